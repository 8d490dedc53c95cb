#pragma once

#include <immintrin.h>

#include "generic.h"

namespace kvdb::simd {

template <class Self>
struct Avx512Base : Generic<Self, 16> {
    using Base = Generic<Self, 16>;
    using typename Base::f32;
    using typename Base::u16;
    static constexpr int registers = 32;
    static constexpr bool has_scaling = true;
    static constexpr int tile_vectors = 4;

    KVDB_INLINE static f32 splat(float x) { return _mm512_set1_ps(x); }
    KVDB_INLINE static f32 fma(f32 a, f32 b, f32 c) { return _mm512_fmadd_ps(a, b, c); }
    KVDB_INLINE static f32 max(f32 a, f32 b) { return _mm512_max_ps(a, b); }

    KVDB_INLINE static f32 round(f32 x) {
        return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    // x * 2^whole
    KVDB_INLINE static f32 scale(f32 x, f32 whole) { return _mm512_scalef_ps(x, whole); }

    KVDB_INLINE static f32 widen(const float* from) { return _mm512_loadu_ps(from); }
    KVDB_INLINE static f32 widen(const std::uint8_t* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(Base::template load<__m128i>(from)));
    }
    KVDB_INLINE static f32 widen(const BFloat16* from) {
        return widen_bf16(Base::template load<__m256i>(from));
    }
    KVDB_INLINE static f32 widen(const Float16* from) {
        return _mm512_cvtph_ps(Base::template load<__m256i>(from));
    }

    // Eight elements; the upper lanes become zero.
    KVDB_INLINE static f32 widen_half(const float* from) {
        return _mm512_maskz_loadu_ps(0xff, from);
    }
    KVDB_INLINE static f32 widen_half(const BFloat16* from) { return widen_bf16(half(from)); }
    KVDB_INLINE static f32 widen_half(const Float16* from) { return _mm512_cvtph_ps(half(from)); }

    using Base::narrow;
    KVDB_INLINE static void narrow(Float16* to, f32 v) {
        Base::store(to, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }

    using typename Base::i32;
    using typename Base::u32;
    KVDB_INLINE static i32 dot_nibbles(u32 nibbles, i32 bytes, i32 sum) {
        const __m512i pairs = _mm512_maddubs_epi16((__m512i)nibbles, (__m512i)bytes);
        return sum + (i32)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    }
    KVDB_INLINE static std::uint32_t clear_lanes(i32 v) {
        return ~static_cast<std::uint32_t>(_mm512_movepi32_mask((__m512i)v)) & 0xffffu;
    }
    // `stride` bytes can be read from `bytes`, whatever `count` is.
    template <int rows, int stride>
    KVDB_INLINE static void sum_chosen(const std::uint8_t* bits, int count,
                                       const std::int8_t* bytes, std::int32_t* sums) {
        const u32 ones = (u32)_mm512_set1_epi8(1);
        i32 parts[rows] = {};
        for (int i = 0; i < count; i += 64) {
            std::uint64_t chosen = 0;
            const int left = count - i < 64 ? (count - i) / 8 : 8;
            if (left == 8) {
                __builtin_memcpy(&chosen, bits + i / 8, 8);
            } else {
                for (int b = 0; b < left; ++b) chosen |= std::uint64_t{bits[i / 8 + b]} << (8 * b);
            }
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) {
                const __m512i row = _mm512_maskz_loadu_epi8(chosen, bytes + r * stride + i);
                parts[r] = Self::dot_nibbles(ones, (i32)row, parts[r]);
            }
        }
        if constexpr (rows == 4) {
            const __m128i all = sum_of_each((__m512i)parts[0], (__m512i)parts[1], (__m512i)parts[2],
                                            (__m512i)parts[3]);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), all);
        } else {
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) sums[r] = _mm512_reduce_add_epi32((__m512i)parts[r]);
        }
    }
    // The sums of four vectors' lanes.
    KVDB_INLINE static __m128i sum_of_each(__m512i a, __m512i b, __m512i c, __m512i d) {
        const __m512i ab =
            _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        const __m512i cd =
            _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        const __m512i all =
            _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        const __m256i half =
            _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
        return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    }
    KVDB_INLINE static std::uint64_t at_least(const std::uint16_t* values, std::uint16_t least) {
        const __m512i bound = _mm512_set1_epi16(static_cast<short>(least));
        const std::uint64_t low = _mm512_cmpge_epu16_mask(_mm512_loadu_si512(values), bound);
        const std::uint64_t high = _mm512_cmpge_epu16_mask(_mm512_loadu_si512(values + 32), bound);
        return low | high << 32;
    }

    KVDB_INLINE static void stream(void* to, u16 v) {
        _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)v);
    }
    KVDB_INLINE static void stream_end() { _mm_sfence(); }

  private:
    KVDB_INLINE static f32 widen_bf16(__m256i v) {
        return (f32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16);
    }
    KVDB_INLINE static __m256i half(const void* from) {
        return _mm256_zextsi128_si256(Base::template load<__m128i>(from));
    }
};

struct Avx512 : Avx512Base<Avx512> {};

}  // namespace kvdb::simd
