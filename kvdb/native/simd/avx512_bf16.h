#pragma once

#include "avx512.h"

namespace kvdb::simd {

// Adds dot products of bfloat16 pairs, 32 multiplications an instruction.
struct Avx512Bf16 : Avx512Base<Avx512Bf16> {
    static constexpr bool has_bf16_dot = true;

    KVDB_INLINE static f32 dot_pairs(f32 a, f32 b, f32 c) {
        return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
    }
    // `pairs` (at most 16) pairs; the lanes above become zero.
    KVDB_INLINE static f32 load_pairs(const BFloat16* from, int pairs) {
        return (f32)_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << pairs) - 1), from);
    }
    // Two vectors of 32 elements to the pairs (a[i], b[i]): the lower 16 and the upper 16.
    KVDB_INLINE static void zip(f32 a, f32 b, f32& low, f32& high) {
        low = (f32)_mm512_permutex2var_epi16((__m512i)a, load<__m512i>(kZipLow), (__m512i)b);
        high = (f32)_mm512_permutex2var_epi16((__m512i)a, load<__m512i>(kZipHigh), (__m512i)b);
    }

    using Avx512Base::narrow;
    KVDB_INLINE static void narrow(BFloat16* to, f32 v) {
        store(to, (__m256i)_mm512_cvtneps_pbh(v));
    }

  private:
    alignas(64) static constexpr unsigned short kZipLow[32] = {
        0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    alignas(64) static constexpr unsigned short kZipHigh[32] = {
        16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
        24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
};

}  // namespace kvdb::simd
