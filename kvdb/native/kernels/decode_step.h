// One tile of tokens for a few rows of one KV head.
//
// Scores of R rows for width / R tokens live in one vector, lane r * tokens + t. So each load of a
// key row serves R query rows, and the softmax needs no transposition.
#pragma once

#include "decode_walk.h"
#include "kernels.h"
#include "operand.h"

namespace kvdb::kernels {

inline constexpr int kGroupsFar = 6;  // how far ahead memory is asked for, of 16 tokens each
inline constexpr int kGroupsNear = 3;

// The groups of which memory is asked for while a tile is computed with: at group g of its keys,
// groups g + kGroupsNear and g + kGroupsFar of a stream, and at group g of its values the same from
// kDecodeGroups on, or from kValuesAlone on where rows of keys and values have other lengths.
inline constexpr int kStreamGroups = kDecodeGroups + kGroupsFar;
inline constexpr int kValuesAlone = kStreamGroups;

template <class T>
struct DecodeStream {
    const T* groups[2 * kStreamGroups];

    // `next` comes behind `loaded`, and is a whole tile.
    template <class Loaded>
    DecodeStream(const Geometry& geometry, const Loaded& loaded, const Loaded& next) {
        if (!geometry.symmetric()) {
            alike(loaded.keys, next.keys, groups);
            alike(loaded.values, next.values, groups + kValuesAlone);
            return;
        }
        for (int g = 0; g < kDecodeGroups; ++g) {
            groups[g] = loaded.keys[g];
            groups[g + kDecodeGroups] = loaded.values[g];
            groups[g + 2 * kDecodeGroups] = next.keys[g];
            groups[g + 3 * kDecodeGroups] = next.values[g];
        }
    }

  private:
    // Keys ask for keys, and values for values: one group ahead and four.
    static void alike(const T* const* these, const T* const* next, const T** stream) {
        for (int g = kGroupsNear; g < kStreamGroups; ++g) {
            const int ahead = g - kGroupsNear + 1;
            stream[g] = ahead < kDecodeGroups ? these[ahead] : next[ahead - kDecodeGroups];
        }
    }
};

// R rows that share each load, and their running softmax.
struct DecodeRows {
    const float* query;  // [R][query_stride] operand lanes
    std::int64_t query_stride;
    float* values;  // [R][stride]
    std::int64_t stride;
    float* max;  // [width], lane r * tokens + t
    float* sum;  // [width], partial: summed over t at the end
    std::int64_t first_row;
};

// `dim` is the head dimension if it has a kernel of its own, else 0.
template <class Isa, class T, int R, int dim>
struct DecodeStep {
    using f32 = typename Isa::f32;
    using Op = Operand<Isa, T>;
    using Loaded = Gathered<Isa, T, kDecodeGroups>;
    static constexpr int tokens = Isa::width / R;        // of one vector of scores
    static constexpr int rows_together = R < 2 ? R : 2;  // when values are added

    // `stream` is null, or the groups of a DecodeStream.
    static void run(const AttendItem& item, const DecodeTile& tile, const Loaded& loaded,
                    const T* const* stream, const DecodeRows& rows) {
        alignas(64) float weights[DecodeTile::tokens_max * R];
        alignas(64) float decay[Isa::width];
        score(item, tile, loaded.keys, stream, rows, weights);
        mask(item, tile, rows, weights);
        softmax(tile, rows, weights, decay);
        if (stream) stream = dim ? stream + kDecodeGroups : values_of(item.geometry, stream);
        accumulate(item, tile, loaded.values, stream, rows, weights, decay);
    }

  private:
    // Of the two products each is a function of its own, so that its registers are.
    //
    // scores[t / tokens][r][t % tokens] = q_r . k_t * scale * log2(e)
    [[gnu::noinline]] static void score(const AttendItem& item, const DecodeTile& tile,
                                        const T* const* keys, const T* const* stream,
                                        const DecodeRows& rows, float* scores) {
        constexpr int step = Isa::width * Op::per_lane;
        const int head_dim = dim ? dim : item.geometry.head_dim;
        const int whole = head_dim / step * step;
        for (int first = 0; first < tile.count; first += tokens) {
            const int element = first % kGroup * head_dim;
            const T* key = keys[first / kGroup] + element;
            f32 sums[Isa::width] = {};
            KVDB_UNROLL
            for (int t = 0; t < tokens; ++t, key += head_dim) {
                if (stream) {
                    prefetch(stream + first / kGroup, element + t * head_dim, head_dim);
                }
                const float* query = rows.query;
                for (int i = 0; i < whole; i += step, query += Isa::width) {
                    multiply<false>(rows, query, key + i, 0, sums + t);
                }
                if (whole < head_dim) {
                    const int lanes = (head_dim - whole) / Op::per_lane;
                    multiply<true>(rows, query, key + whole, lanes, sums + t);
                }
            }
            Isa::store(scores + first * R, simd::sum_each<Isa>(sums) * item.scale_log2e);
        }
    }

    // One token's share of its scores: sums[r * tokens] += q_r * k.
    template <bool tail>
    KVDB_INLINE static void multiply(const DecodeRows& rows, const float* query, const T* key,
                                     int tail_lanes, f32* sums) {
        const f32 k = tail ? Op::load_tail(key, tail_lanes) : Op::load(key);
        KVDB_UNROLL
        for (int r = 0; r < R; ++r) {
            const f32 q = Isa::template load<f32>(query + r * rows.query_stride);
            sums[r * tokens] = Op::multiply_add(q, k, sums[r * tokens]);
        }
    }

    // Fetches, into the L2 cache, `elements` of the groups far and near ahead. Measured on Zen 4: a
    // prefetch is dropped when too many are under way, and a line that is missing when it is used
    // costs more than anything else. So each line is asked for twice, and requests are spread
    // evenly over the arithmetic; the caller is at `part` of `parts`.
    KVDB_INLINE static void prefetch(const T* const* stream, int element, int elements,
                                     int part = 0, int parts = 1) {
        constexpr int line = 64 / static_cast<int>(sizeof(T));
        for (int i = element + part * line; i < element + elements; i += parts * line) {
            __builtin_prefetch(stream[kGroupsFar] + i, 0, 2);
            __builtin_prefetch(stream[kGroupsNear] + i, 0, 2);
        }
    }

    // Masks tokens that a row may not see, and the padding behind the last token. An idle row sees
    // what the last row sees.
    static void mask(const AttendItem& item, const DecodeTile& tile, const DecodeRows& rows,
                     float* scores) {
        const int end = static_cast<int>(round_up(tile.count, tokens));
        for (int r = 0; r < R; ++r) {
            const std::int64_t row = rows.first_row + r;
            const std::int64_t seen =
                visible(item, row < item.row_end ? row : item.row_end - 1) - tile.begin;
            int t = tile.count;
            if (seen < t) t = seen < 0 ? 0 : static_cast<int>(seen);
            for (; t < end; ++t) {
                scores[t / tokens * Isa::width + r * tokens + t % tokens] = -__builtin_inff();
            }
        }
        if (item.begins) mask_before(item, tile, rows, scores);
        if (tile.any_hidden()) hide(tile, scores);
    }

    // Null where the values lie in keys, which were asked for.
    static const T* const* values_of(const Geometry& geometry, const T* const* stream) {
        if (geometry.values_in_keys) return nullptr;
        return stream + (geometry.symmetric() ? kDecodeGroups : kValuesAlone);
    }

    // Masks tokens before the first that a row sees.
    [[gnu::noinline]] static void mask_before(const AttendItem& item, const DecodeTile& tile,
                                              const DecodeRows& rows, float* scores) {
        for (int r = 0; r < R; ++r) {
            const std::int64_t row = rows.first_row + r;
            const std::int64_t first =
                first_visible(item, row < item.row_end ? row : item.row_end - 1) - tile.begin;
            for (int t = 0; t < first && t < tile.count; ++t) {
                scores[t / tokens * Isa::width + r * tokens + t % tokens] = -__builtin_inff();
            }
        }
    }

    static void hide(const DecodeTile& tile, float* scores) {
        static_assert(DecodeTile::tokens_max <= 64);
        for (std::uint64_t bits = tile.hidden[0]; bits; bits &= bits - 1) {
            const int t = __builtin_ctzll(bits);
            float* at = scores + t / tokens * Isa::width + t % tokens;
            for (int r = 0; r < R; ++r) at[r * tokens] = -__builtin_inff();
        }
    }

    // Turns scores into weights, exp2(s - max), in place. `decay`, with lanes as in the scores,
    // gets the factor by which a higher maximum shrinks older weights.
    static void softmax(const DecodeTile& tile, const DecodeRows& rows, float* weights,
                        float* decay) {
        const int end = static_cast<int>(round_up(tile.count, tokens)) * R;
        const f32 old_max = Isa::template load<f32>(rows.max);
        f32 max = old_max;
        for (int i = 0; i < end; i += Isa::width) {
            max = Isa::max(max, Isa::template load<f32>(weights + i));
        }
        max = simd::max_of_group<Isa, tokens>(max);
        // For a row that has seen nothing yet, -inf - -inf would be NaN.
        const f32 base = max == -__builtin_inff() ? f32{} : max;
        const f32 rise = simd::exp2<Isa>(old_max - base);
        f32 sum = Isa::template load<f32>(rows.sum) * rise;
        for (int i = 0; i < end; i += Isa::width) {
            const f32 weight = simd::exp2<Isa>(Isa::template load<f32>(weights + i) - base);
            Op::store_weights(weights, i, weight);
            sum += weight;
        }
        Isa::store(rows.max, max);
        Isa::store(rows.sum, sum);
        Isa::store(decay, rise);
    }

    // values[r] = values[r] * decay[r] + sum over t of weights[t][r] * v_t
    static void accumulate(const AttendItem& item, const DecodeTile& tile, const T* const* values,
                           const T* const* stream, const DecodeRows& rows, const float* weights,
                           const float* decay) {
        for (int r = 0; r < R; ++r) {
            float* row = rows.values + r * rows.stride;
            for (int i = 0; i < rows.stride; i += Isa::width) {
                Isa::store(row + i, Isa::template load<f32>(row + i) * decay[r * tokens]);
            }
        }
        for (int g = 0; g < tile.group_count(); ++g) {
            const float* weight = weights + g * kGroup * R / Op::per_lane;
            const int count = static_cast<int>(round_up(tile.tokens_in(g), tokens));
            add_group(item.geometry, values[g], stream ? stream + g : nullptr, count, weight, rows);
        }
    }

    // One group, two rows at a time, so that all dimensions fit the registers and a row of values
    // is read from end to end. (Parts of rows would be read with gaps, which halves the speed of
    // memory; the second time, the group is in the L1 cache.)
    [[gnu::noinline]] static void add_group(const Geometry& geometry, const T* values,
                                            const T* const* stream, int count, const float* weights,
                                            const DecodeRows& rows) {
        const int value_dim = dim ? dim : geometry.value_dim;
        const int apart = dim ? dim : geometry.value_stride();
        constexpr int dims = Op::value_dims;
        constexpr int vectors = Isa::registers / 2 / rows_together;
        constexpr int most = (vectors < 8 ? vectors : 8) / Op::value_vectors;  // loads
        for (int r = 0; r < R; r += rows_together) {
            float* sums = rows.values + r * rows.stride;
            const float* weight = weights + r * tokens / Op::per_lane;
            int i = 0;
            const T* const* ahead = stream;  // in the first of the loops only
            for (; i + most * dims <= value_dim; i += most * dims, ahead = nullptr) {
                add_values<most, false>(value_dim, apart, values + i, ahead, r, count, weight,
                                        sums + i, rows.stride);
            }
            for (; i + dims <= value_dim; i += dims, ahead = nullptr) {
                add_values<1, false>(value_dim, apart, values + i, ahead, r, count, weight,
                                     sums + i, rows.stride);
            }
            if (i < value_dim) {
                add_values<1, true>(value_dim, apart, values + i, ahead, r, count, weight, sums + i,
                                    rows.stride);
            }
        }
    }

    template <int loads, bool tail>
    KVDB_INLINE static void add_values(int value_dim, int apart, const T* value,
                                       const T* const* stream, int r, int count,
                                       const float* weight, float* sums_at, std::int64_t stride) {
        constexpr int dims = Op::value_dims;
        constexpr int vectors = loads * Op::value_vectors;
        f32 sums[rows_together][vectors];
        KVDB_UNROLL
        for (int r = 0; r < rows_together; ++r) {
            KVDB_UNROLL
            for (int i = 0; i < vectors; ++i) {
                sums[r][i] = Isa::template load<f32>(sums_at + r * stride + i * Isa::width);
            }
        }
        for (int first = 0; first < count; first += tokens, weight += tokens * R / Op::per_lane) {
            KVDB_UNROLL
            for (int t = 0; t < tokens; t += Op::per_lane, value += Op::per_lane * apart) {
                if (stream) {
                    prefetch(stream, (first + t) * apart, Op::per_lane * apart, r / rows_together,
                             R / rows_together);
                }
                f32 v[vectors];
                KVDB_UNROLL
                for (int i = 0; i < loads; ++i) {
                    const T* at = value + i * dims;
                    f32* into = v + i * Op::value_vectors;
                    if constexpr (tail) {
                        Op::load_values_tail(at, apart, value_dim % dims, into);
                    } else {
                        Op::load_values(at, apart, into);
                    }
                }
                KVDB_UNROLL
                for (int r = 0; r < rows_together; ++r) {
                    const f32 w = Isa::splat(weight[(r * tokens + t) / Op::per_lane]);
                    KVDB_UNROLL
                    for (int i = 0; i < vectors; ++i) {
                        sums[r][i] = Op::multiply_add(w, v[i], sums[r][i]);
                    }
                }
            }
        }
        KVDB_UNROLL
        for (int r = 0; r < rows_together; ++r) {
            KVDB_UNROLL
            for (int i = 0; i < vectors; ++i) {
                Isa::store(sums_at + r * stride + i * Isa::width, sums[r][i]);
            }
        }
    }
};

}  // namespace kvdb::kernels
