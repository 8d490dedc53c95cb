// One tile of quantized tokens for R rows of one KV head.
#pragma once

#include "kernels.h"
#include "operand.h"
#include "quantized_softmax.h"

namespace kvdb::kernels {

template <class Isa, int key_bits, int value_bits, int R>
struct QuantizedStep {
    using f32 = typename Isa::f32;
    using i32 = typename Isa::i32;
    using Softmax = QuantizedSoftmax<Isa, value_bits, R>;
    static constexpr int query_parts = key_bits == 8 ? 2 : 1;
    static constexpr int weight_parts = Softmax::parts;
    static constexpr int vectors = kQuantizedGroup / Isa::width;  // of a group's tokens
    static constexpr int sums_most = Isa::registers / 2;

    static void run(const AttendItem& item, const QuantizedHead& layout, const QuantizedTile& tile,
                    const QuantizedRows& rows) {
        alignas(64) float scores[R][kQuantizedTile];
        alignas(64) std::uint8_t weights[R][weight_parts][kQuantizedTile];
        QuantizedWeight weighted[R];
        score(item, layout, tile, rows, scores);
        mask(item, tile, rows, scores);
        Softmax::run(layout, tile, rows, scores, weights, weighted);
        accumulate(item.geometry.head_dim, layout, tile, rows, weights, weighted);
    }

  private:
    // Sums of products of four bytes, those of `a` unsigned, those of `b` signed.
    template <bool nibbles>
    KVDB_INLINE static i32 dot(i32 a, i32 b, i32 c) {
        using u32 = typename Isa::u32;
        if constexpr (requires { Isa::dot_bytes(a, b, c); }) {
            return Isa::dot_bytes(a, b, c);
        } else if constexpr (nibbles) {
            return Isa::dot_nibbles((u32)a, b, c);
        } else {
            const i32 high = Isa::dot_nibbles((u32)a >> 4 & 0x0f0f0f0fu, b, i32{});
            return Isa::dot_nibbles((u32)a & 0x0f0f0f0fu, b, c) + high * 16;
        }
    }
    KVDB_INLINE static i32 low_nibbles(i32 a) { return a & 0x0f0f0f0f; }
    KVDB_INLINE static i32 high_nibbles(i32 a) { return a >> 4 & 0x0f0f0f0f; }

    // Four bytes in every lane.
    KVDB_INLINE static i32 four(const void* at) {
        std::int32_t lane;
        __builtin_memcpy(&lane, at, sizeof lane);
        return i32{} + lane;
    }

    KVDB_INLINE static void prefetch(const std::byte* at, const QuantizedTile& tile) {
        if (tile.ahead) __builtin_prefetch(at + tile.ahead, 0, 2);
    }

    // scores = (centre + key) . query * scale * log2(e)
    static void score(const AttendItem& item, const QuantizedHead& layout,
                      const QuantizedTile& tile, const QuantizedRows& rows,
                      float (&scores)[R][kQuantizedTile]) {
        const int head_dim = item.geometry.head_dim;
        float steps[R], bases[R];
        std::int32_t corrections[R];
        for (int r = 0; r < R; ++r) {
            const float* query = rows.query + r * rows.query_stride;
            const float* last = query + rows.stride + query_parts * rows.stride / 4;
            steps[r] = last[0] * item.scale_log2e;
            __builtin_memcpy(corrections + r, last + 1, sizeof corrections[r]);
            bases[r] =
                dot_centre(query, tile.head + layout.key_centre, head_dim) * item.scale_log2e;
        }
        constexpr int wanted = sums_most / (R * query_parts * vectors);
        constexpr int together = wanted < 1 ? 1 : wanted > 4 ? 4 : wanted;
        const auto* scales =
            reinterpret_cast<const BFloat16*>(tile.head + layout.key_scales) + tile.slot;
        const std::size_t group_bytes = std::size_t{kQuantizedGroup} * head_dim * key_bits / 8;
        const std::byte* keys = tile.head + tile.slot / kQuantizedGroup * group_bytes;
        int g = 0;
        const auto finish = [&](const auto& sums, int count) {
            for (int i = 0; i < count; ++i) {
                KVDB_UNROLL
                for (int r = 0; r < R; ++r) {
                    KVDB_UNROLL
                    for (int v = 0; v < vectors; ++v) {
                        const int t = (g + i) * kQuantizedGroup + v * Isa::width;
                        const f32 whole =
                            __builtin_convertvector(sums[i][r][v] + corrections[r], f32);
                        Isa::store(scores[r] + t,
                                   Isa::fma(whole * Isa::widen(scales + t), Isa::splat(steps[r]),
                                            Isa::splat(bases[r])));
                    }
                }
            }
        };
        for (; g + together <= tile.groups(); g += together) {
            i32 sums[together][R][vectors];
            multiply<together>(keys + g * group_bytes, group_bytes, head_dim, tile, rows, sums);
            finish(sums, together);
        }
        for (; g < tile.groups(); ++g) {
            i32 sums[1][R][vectors];
            multiply<1>(keys + g * group_bytes, group_bytes, head_dim, tile, rows, sums);
            finish(sums, 1);
        }
    }

    static float dot_centre(const float* query, const std::byte* centre, int head_dim) {
        const auto* at = reinterpret_cast<const BFloat16*>(centre);
        f32 sum{};
        int i = 0;
        for (; i + Isa::width <= head_dim; i += Isa::width) {
            sum = Isa::fma(Isa::template load<f32>(query + i), Isa::widen(at + i), sum);
        }
        if constexpr (Isa::width > kHeadDimStep) {
            if (i < head_dim) {
                sum = Isa::fma(Isa::template load<f32>(query + i), Isa::widen_half(at + i), sum);
            }
        }
        return simd::sum_of_group<Isa, Isa::width>(sum)[0];
    }

    // The products of the codes of `count` groups with the bytes of the queries.
    template <int count>
    KVDB_INLINE static void multiply(const std::byte* keys, std::size_t group_bytes, int head_dim,
                                     const QuantizedTile& tile, const QuantizedRows& rows,
                                     i32 (&out)[count][R][vectors]) {
        constexpr int step = key_bits == 8 ? 4 : 8;  // channels of a lane
        i32 sums[count][R][query_parts][vectors] = {};
        const auto* bytes = reinterpret_cast<const std::int8_t*>(rows.query + rows.stride);
        for (int c = 0; c < head_dim; c += step, keys += 64) {
            KVDB_UNROLL
            for (int i = 0; i < count; ++i) {
                prefetch(keys + i * group_bytes, tile);
                KVDB_UNROLL
                for (int v = 0; v < vectors; ++v) {
                    const i32 codes = Isa::template load<i32>(keys + i * group_bytes +
                                                              v * Isa::width * sizeof(float));
                    KVDB_UNROLL
                    for (int r = 0; r < R; ++r) {
                        const std::int8_t* query =
                            bytes + r * rows.query_stride * std::int64_t{sizeof(float)} + c;
                        KVDB_UNROLL
                        for (int p = 0; p < query_parts; ++p) {
                            i32& sum = sums[i][r][p][v];
                            if constexpr (key_bits == 8) {
                                sum = dot<false>(codes, four(query + p * rows.stride), sum);
                            } else {
                                sum = dot<true>(low_nibbles(codes), four(query), sum);
                                sum = dot<true>(high_nibbles(codes), four(query + 4), sum);
                            }
                        }
                    }
                }
            }
        }
        KVDB_UNROLL
        for (int i = 0; i < count; ++i) {
            KVDB_UNROLL
            for (int r = 0; r < R; ++r) {
                KVDB_UNROLL
                for (int v = 0; v < vectors; ++v) {
                    out[i][r][v] = sums[i][r][0][v];
                    if constexpr (query_parts == 2) out[i][r][v] += sums[i][r][1][v] * 256;
                }
            }
        }
    }

    // An idle row sees what the last row sees.
    static void mask(const AttendItem& item, const QuantizedTile& tile, const QuantizedRows& rows,
                     float (&scores)[R][kQuantizedTile]) {
        for (int r = 0; r < R; ++r) {
            const std::int64_t row = rows.first_row + r;
            const std::int64_t seen =
                visible(item, row < item.row_end ? row : item.row_end - 1) - tile.begin;
            int t = tile.count;
            if (seen < t) t = seen < 0 ? 0 : static_cast<int>(seen);
            for (; t < tile.groups() * kQuantizedGroup; ++t) scores[r][t] = -__builtin_inff();
            const std::int64_t first =
                first_visible(item, row < item.row_end ? row : item.row_end - 1) - tile.begin;
            for (t = 0; t < first && t < tile.count; ++t) scores[r][t] = -__builtin_inff();
            for (std::uint64_t bits = tile.hidden; bits; bits &= bits - 1) {
                scores[r][__builtin_ctzll(bits)] = -__builtin_inff();
            }
        }
    }

    // values = values * decay + weights * (centre + value)
    static void accumulate(int head_dim, const QuantizedHead& layout, const QuantizedTile& tile,
                           const QuantizedRows& rows,
                           const std::uint8_t (&weights)[R][weight_parts][kQuantizedTile],
                           const QuantizedWeight (&weighted)[R]) {
        constexpr int wanted = sums_most / (R * weight_parts);
        constexpr int together = wanted < 1 ? 1 : wanted > 8 ? 8 : wanted;
        int i = 0;
        for (; i + together * Isa::width <= head_dim; i += together * Isa::width) {
            add<together>(head_dim, i, layout, tile, rows, weights, weighted);
        }
        for (; i < head_dim; i += Isa::width) {
            add<1>(head_dim, i, layout, tile, rows, weights, weighted);
        }
    }

    // `count` vectors of channels from channel `i` on. The last may be half a vector: what is read
    // behind it lies in the block, and lands behind the row.
    template <int count>
    KVDB_INLINE static void add(int head_dim, int i, const QuantizedHead& layout,
                                const QuantizedTile& tile, const QuantizedRows& rows,
                                const std::uint8_t (&weights)[R][weight_parts][kQuantizedTile],
                                const QuantizedWeight (&weighted)[R]) {
        constexpr int step = value_bits == 8 ? 4 : 8;  // tokens of a lane
        i32 sums[R][weight_parts][count] = {};
        const std::byte* values =
            tile.head + layout.values + std::size_t{4} * (tile.slot / step * head_dim + i);
        for (int t = 0; t < tile.groups() * kQuantizedGroup;
             t += step, values += std::size_t{4} * head_dim) {
            i32 codes[count];
            KVDB_UNROLL
            for (int v = 0; v < count; ++v) {
                const std::byte* at = values + v * Isa::width * sizeof(float);
                if (v * Isa::width % 16 == 0) prefetch(at, tile);
                codes[v] = Isa::template load<i32>(at);
            }
            KVDB_UNROLL
            for (int r = 0; r < R; ++r) {
                KVDB_UNROLL
                for (int p = 0; p < weight_parts; ++p) {
                    KVDB_UNROLL
                    for (int v = 0; v < count; ++v) {
                        i32& sum = sums[r][p][v];
                        if constexpr (value_bits == 8) {
                            sum = dot<false>(four(weights[r][p] + t), codes[v], sum);
                        } else {
                            sum = dot<false>(four(weights[r][p] + t), low_nibbles(codes[v]), sum);
                            sum = dot<false>(four(weights[r][p] + t + 4), high_nibbles(codes[v]),
                                             sum);
                        }
                    }
                }
            }
        }
        const auto* centre = reinterpret_cast<const BFloat16*>(tile.head + layout.value_centre) + i;
        KVDB_UNROLL
        for (int r = 0; r < R; ++r) {
            KVDB_UNROLL
            for (int v = 0; v < count; ++v) {
                float* to = rows.values + r * rows.stride + i + v * Isa::width;
                i32 whole = sums[r][0][v];
                if constexpr (weight_parts == 2) whole += sums[r][1][v] * 256;
                const f32 mean =
                    Isa::fma(Isa::widen(centre + v * Isa::width), Isa::splat(weighted[r].sum),
                             Isa::splat(weighted[r].bias));
                const f32 added = Isa::fma(__builtin_convertvector(whole, f32),
                                           Isa::splat(weighted[r].step), mean);
                Isa::store(to, Isa::fma(Isa::template load<f32>(to), Isa::splat(weighted[r].decay),
                                        added));
            }
        }
    }
};

}  // namespace kvdb::kernels
