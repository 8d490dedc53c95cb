// The rotation of quantized keys and values: signs are flipped, and a Walsh-Hadamard transform
// spreads each channel over all of its neighbours. Inner products stay as they are.
#pragma once

#include "generic.h"
#include "geometry.h"

namespace kvdb::simd {

template <class Isa>
class Hadamard {
    using f32 = typename Isa::f32;

  public:
    // In place; x has room for head_dim rounded up to whole vectors.
    static void rotate(float* x, int head_dim) {
        flip_signs(x, head_dim);
        transform(x, head_dim);
    }
    static void rotate_back(float* x, int head_dim) {
        transform(x, head_dim);
        flip_signs(x, head_dim);
    }

  private:
    // As many channels as the largest power of two that divides head_dim are transformed together.
    static constexpr int together(int head_dim) { return head_dim & -head_dim; }

    struct Signs {
        float of[kHeadDimMax];

        constexpr Signs() : of{} {
            std::uint32_t bits = 0x9e3779b9u;
            for (float& sign : of) {
                bits = bits * 1664525u + 1013904223u;
                sign = bits >> 31 ? -1.0f : 1.0f;
            }
        }
    };
    static constexpr Signs kSigns{};

    static void flip_signs(float* x, int head_dim) {
        const float unit = 1 / __builtin_sqrtf(static_cast<float>(together(head_dim)));
        for (int i = 0; i < head_dim; ++i) x[i] *= kSigns.of[i] * unit;
    }

    static void transform(float* x, int head_dim) {
        const int block = together(head_dim);
        for (int i = 0; i < head_dim; i += Isa::width) {
            Isa::store(x + i, in_lanes<1>(Isa::template load<f32>(x + i), block));
        }
        for (int half = Isa::width; half < block; half *= 2) {
            for (int begin = 0; begin < head_dim; begin += 2 * half) {
                for (int i = begin; i < begin + half; i += Isa::width) {
                    const f32 a = Isa::template load<f32>(x + i);
                    const f32 b = Isa::template load<f32>(x + i + half);
                    Isa::store(x + i, a + b);
                    Isa::store(x + i + half, a - b);
                }
            }
        }
    }

    // The stages whose partners are in one vector.
    template <int half>
    KVDB_INLINE static f32 in_lanes(f32 v, int block) {
        if constexpr (half < Isa::width) {
            if (half >= block) return v;
            f32 sign;
            KVDB_UNROLL
            for (int i = 0; i < Isa::width; ++i) sign[i] = i & half ? -1.0f : 1.0f;
            v = Isa::fma(v, sign, exchange<Isa, half>(v, Lanes<Isa>{}));
            return in_lanes<2 * half>(v, block);
        } else {
            return v;
        }
    }
};

}  // namespace kvdb::simd
