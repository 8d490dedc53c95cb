#pragma once

#include <immintrin.h>

#include "generic.h"

namespace kvdb::simd {

struct Avx2 : Generic<Avx2, 8> {
    KVDB_INLINE static f32 splat(float x) { return _mm256_set1_ps(x); }
    KVDB_INLINE static f32 fma(f32 a, f32 b, f32 c) { return _mm256_fmadd_ps(a, b, c); }
    KVDB_INLINE static f32 max(f32 a, f32 b) { return _mm256_max_ps(a, b); }

    using Generic::widen;
    KVDB_INLINE static f32 widen(const BFloat16* from) {
        const __m128i halves = load<__m128i>(from);
        return (f32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
    }
    KVDB_INLINE static f32 widen(const Float16* from) {
        return _mm256_cvtph_ps(load<__m128i>(from));
    }

    using Generic::narrow;
    KVDB_INLINE static void narrow(Float16* to, f32 v) {
        store(to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }

    KVDB_INLINE static i32 dot_nibbles(u32 nibbles, i32 bytes, i32 sum) {
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)nibbles, (__m256i)bytes);
        return sum + (i32)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    KVDB_INLINE static std::uint32_t clear_lanes(i32 v) {
        return ~_mm256_movemask_ps((__m256)v) & 0xffu;
    }

    KVDB_INLINE static void stream(void* to, u16 v) {
        _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)v);
    }
    KVDB_INLINE static void stream_end() { _mm_sfence(); }
};

}  // namespace kvdb::simd
