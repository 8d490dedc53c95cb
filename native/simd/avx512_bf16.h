#pragma once

#include "avx512.h"

namespace kvdb::simd {

// Adds dot products of bfloat16 pairs, 32 multiplications an instruction.
struct Avx512Bf16 : Avx512Base<Avx512Bf16> {
    static constexpr bool has_bf16_dot = true;

    KVDB_INLINE static f32 dot_pairs(f32 a, f32 b, f32 c) {
        return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
    }
    // Adds dot products of four bytes, those of `a` unsigned, those of `b` signed.
    KVDB_INLINE static i32 dot_bytes(i32 a, i32 b, i32 c) {
        return (i32)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
    }
    // `pairs` (at most 16) pairs; the lanes above become zero.
    KVDB_INLINE static f32 load_pairs(const BFloat16* from, int pairs) {
        return (f32)_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << pairs) - 1), from);
    }
    // Two vectors of 32 elements to the pairs (a[i], b[i]), in the order that costs least: of every
    // eight, the first four in `low` and the last four in `high`.
    KVDB_INLINE static void zip(f32 a, f32 b, f32& low, f32& high) {
        low = (f32)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
        high = (f32)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
    }
    // From that order to the natural one.
    KVDB_INLINE static void unzip(f32& low, f32& high) {
        const __m512i first =
            _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        const f32 natural = _mm512_permutex2var_ps(low, first, high);
        high = _mm512_permutex2var_ps(low, last, high);
        low = natural;
    }

    KVDB_INLINE static i32 dot_nibbles(u32 nibbles, i32 bytes, i32 sum) {
        return dot_bytes((i32)nibbles, bytes, sum);
    }

    using Avx512Base::narrow;
    KVDB_INLINE static void narrow(BFloat16* to, f32 v) {
        store(to, (__m256i)_mm512_cvtneps_pbh(v));
    }
};

}  // namespace kvdb::simd
