#pragma once

#include <arm_neon.h>

#include "generic.h"

namespace kvdb::simd {

struct Neon : Generic<Neon, 4> {
    static constexpr int registers = 32;
    static constexpr int tile_vectors = 4;

    KVDB_INLINE static f32 splat(float x) { return (f32)vdupq_n_f32(x); }
    KVDB_INLINE static f32 fma(f32 a, f32 b, f32 c) { return (f32)vfmaq_f32(c, a, b); }
    KVDB_INLINE static f32 max(f32 a, f32 b) { return (f32)vmaxq_f32(a, b); }

    using Generic::widen;
    KVDB_INLINE static f32 widen(const Float16* from) {
        return (f32)vcvt_f32_f16(load<float16x4_t>(from));
    }
    using Generic::narrow;
    KVDB_INLINE static void narrow(Float16* to, f32 v) { store(to, vcvt_f16_f32(v)); }
};

}  // namespace kvdb::simd
