// The softmax of a tile of quantized tokens, for R rows: scores become weights, and these bytes.
#pragma once

#include "quantized_tile.h"

namespace kvdb::kernels {

// What a row's weights are multiplied with after the product of bytes.
struct QuantizedWeight {
    float decay;  // of the older weights
    float step;
    float bias;  // for the codes' zero
    float sum;   // of the weights, for the centre
};

template <class Isa, int value_bits, int R>
struct QuantizedSoftmax {
    using f32 = typename Isa::f32;
    using i32 = typename Isa::i32;
    using u8 = typename simd::Vector<std::uint8_t, Isa::width>::type;
    static constexpr int parts = value_bits == 8 ? 2 : 1;          // bytes of a weight
    static constexpr float units = parts == 2 ? 65535 : 255;       // of the largest
    static constexpr float zero = value_bits == 8 ? -0.5f : 7.5f;  // of the codes, as multiplied

    // Turns scores into exp2(s - max) times the scale of the value, in place, and into `weights`.
    static void run(const QuantizedHead& layout, const QuantizedTile& tile,
                    const QuantizedRows& rows, float (&scores)[R][kQuantizedTile],
                    std::uint8_t (&weights)[R][parts][kQuantizedTile],
                    QuantizedWeight (&weighted)[R]) {
        const int end = tile.groups() * kQuantizedGroup;
        float base[R];
        raise(rows, end, scores, weighted, base);
        const auto* scales =
            reinterpret_cast<const BFloat16*>(tile.head + layout.value_scales) + tile.slot;
        f32 sum[R] = {}, most[R] = {};
        for (int t = 0; t < end; t += Isa::width) {
            const f32 scale = Isa::widen(scales + t);
            KVDB_UNROLL
            for (int r = 0; r < R; ++r) {
                const f32 score = Isa::template load<f32>(scores[r] + t);
                const f32 weight = simd::exp2<Isa>(score - Isa::splat(base[r]));
                const f32 scaled = weight * scale;
                sum[r] += weight;
                most[r] = Isa::max(most[r], scaled);
                Isa::store(scores[r] + t, scaled);
            }
        }
        const f32 sums = sum_of(sum), steps = largest_of(most) * (1 / units);
        for (int r = 0; r < R; ++r) {
            weighted[r].sum = sums[lane(r)];
            weighted[r].step = steps[lane(r)];
            rows.sum[r] = rows.sum[r] * weighted[r].decay + weighted[r].sum;
        }
        round(end, scores, weights, weighted);
    }

  private:
    // Raises the rows' maxima to those of the scores. base: the maxima, 0 for rows that saw
    // nothing, for which -inf - -inf would be NaN.
    static void raise(const QuantizedRows& rows, int end, const float (&scores)[R][kQuantizedTile],
                      QuantizedWeight (&weighted)[R], float (&base)[R]) {
        f32 largest[R];
        KVDB_UNROLL
        for (int r = 0; r < R; ++r) largest[r] = Isa::template load<f32>(scores[r]);
        for (int t = Isa::width; t < end; t += Isa::width) {
            KVDB_UNROLL
            for (int r = 0; r < R; ++r) {
                largest[r] = Isa::max(largest[r], Isa::template load<f32>(scores[r] + t));
            }
        }
        const f32 tops = largest_of(largest);
        for (int r = 0; r < R; ++r) {
            const float old = rows.max[r];
            if (tops[lane(r)] > old) rows.max[r] = tops[lane(r)];
            base[r] = rows.max[r] == -__builtin_inff() ? 0.0f : rows.max[r];
            weighted[r].decay =
                base[r] == old ? 1.0f : simd::exp2<Isa>(Isa::splat(old - base[r]))[0];
        }
    }

    static void round(int end, const float (&scores)[R][kQuantizedTile],
                      std::uint8_t (&weights)[R][parts][kQuantizedTile],
                      QuantizedWeight (&weighted)[R]) {
        float inverse[R];
        for (int r = 0; r < R; ++r) {
            inverse[r] = weighted[r].step > 0 ? (1 - 0x1p-22f) / weighted[r].step : 0;
        }
        f32 count[R] = {};
        for (int t = 0; t < end; t += Isa::width) {
            KVDB_UNROLL
            for (int r = 0; r < R; ++r) {
                const f32 exact = Isa::fma(Isa::template load<f32>(scores[r] + t),
                                           Isa::splat(inverse[r]), Isa::splat(0.5f));
                const i32 whole = __builtin_convertvector(exact, i32);
                count[r] += __builtin_convertvector(whole, f32);
                Isa::store(weights[r][0] + t, __builtin_convertvector(whole & 255, u8));
                if constexpr (parts == 2) {
                    Isa::store(weights[r][1] + t, __builtin_convertvector(whole >> 8, u8));
                }
            }
        }
        const f32 counts = sum_of(count);
        for (int r = 0; r < R; ++r) {
            weighted[r].bias = -zero * counts[lane(r)] * weighted[r].step;
        }
    }

    // The reductions of R vectors at once; lane `lane(r)` is that of vector r.
    static constexpr int lane(int r) { return R == 4 ? r : 2 * r; }

    template <class Combine>
    KVDB_INLINE static f32 reduce(const f32 (&v)[R], Combine&& combine) {
        const simd::Lanes<Isa> lanes;
        const auto fold = [&](f32 a, f32 b) {
            return combine(simd::every_other<Isa, false, 0>(a, b, lanes),
                           simd::every_other<Isa, false, 1>(a, b, lanes));
        };
        f32 all = fold(v[0], v[R > 1]);
        if constexpr (R == 4) all = fold(all, fold(v[2], v[3]));
        if constexpr (R < 4) all = combine(all, simd::exchange<Isa, 1>(all, lanes));
        if constexpr (Isa::width > 4) all = combine(all, simd::exchange<Isa, 4>(all, lanes));
        if constexpr (Isa::width > 8) all = combine(all, simd::exchange<Isa, 8>(all, lanes));
        return all;
    }
    KVDB_INLINE static f32 largest_of(const f32 (&v)[R]) {
        return reduce(v, [](f32 a, f32 b) { return Isa::max(a, b); });
    }
    KVDB_INLINE static f32 sum_of(const f32 (&v)[R]) {
        return reduce(v, [](f32 a, f32 b) { return a + b; });
    }
};

}  // namespace kvdb::kernels
