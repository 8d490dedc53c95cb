// Attention of a few rows: the context is read once, in place, and reading it is the cost.
//
// An item takes all KV heads of its blocks, tile by tile, so that memory is read in the order in
// which it lies: in two streams, keys and values. (Head by head, every 16 KiB the hardware's
// prefetchers and the TLB start anew, which halves the bandwidth of one core.)
//
// Scores of R rows for width / R tokens live in one vector, lane r * tokens + t. So every load of a
// key row serves R query rows, and the softmax needs no transposition.
#pragma once

#include "../kernels.h"
#include "gathered.h"
#include "operand.h"

namespace kvdb::kernels {

inline constexpr int kDecodeGroups = 4;
using DecodeTile = Tile<kDecodeGroups>;

// R rows that share each load, and their running softmax.
struct DecodeRows {
    const float* query;  // [R][stride] operand lanes
    float* values;       // [R][stride]
    std::int64_t stride;
    float* max;  // [width], lane r * tokens + t
    float* sum;  // [width], partial: summed over t at the end
    std::int64_t first_row;
};

// `dim` is the head dimension where it is worth a kernel of its own, else 0.
template <class Isa, class T, int R, int dim>
struct DecodeStep {
    using f32 = typename Isa::f32;
    using Op = Operand<Isa, T>;
    using Loaded = Gathered<Isa, T, kDecodeGroups>;
    static constexpr int tokens = Isa::width / R;        // of one vector of scores
    static constexpr int rows_together = R < 2 ? R : 2;  // when values are added

    // `next` is what will be needed after this: fetched meanwhile, as far as it is there.
    static void run(const AttendItem& item, const DecodeTile& tile, const Loaded& loaded,
                    const Loaded* next, const DecodeRows& rows) {
        alignas(64) float weights[DecodeTile::tokens_max * R];
        alignas(64) float decay[Isa::width];
        score(item, tile, loaded.keys, next ? loaded.values : nullptr, rows, weights);
        mask(item, tile, rows, weights);
        softmax(tile, rows, weights, decay);
        accumulate(item, tile, loaded.values, next ? next->keys : nullptr, rows, weights, decay);
    }

  private:
    // scores[t / tokens][r][t % tokens] = q_r . k_t * scale * log2(e)
    static void score(const AttendItem& item, const DecodeTile& tile, const T* const* keys,
                      const T* const* next, const DecodeRows& rows, float* scores) {
        constexpr int step = Isa::width * Op::per_lane;
        const int head_dim = dim ? dim : item.geometry.head_dim;
        const int whole = head_dim / step * step;
        for (int first = 0; first < tile.count; first += tokens) {
            const int element = first % kGroup * head_dim;
            const T* key = keys[first / kGroup] + element;
            f32 sums[Isa::width] = {};
            KVDB_UNROLL
            for (int t = 0; t < tokens; ++t, key += head_dim) {
                if (next) prefetch(next[first / kGroup] + element + t * head_dim, head_dim);
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
            const f32 q = Isa::template load<f32>(query + r * rows.stride);
            sums[r * tokens] = Op::multiply_add(q, k, sums[r * tokens]);
        }
    }

    // Fetches some elements to the L2 cache, of which `part` of `parts`. Measured on Zen 4: to the
    // L1 cache, or many lines at once, is much slower; and as long as there is little to compute,
    // the hardware does it better itself if it is shown every other line.
    KVDB_INLINE static void prefetch(const T* from, int elements, int part = 0, int parts = 1) {
        constexpr int line = (R < 4 ? 128 : 64) / static_cast<int>(sizeof(T));
        for (int i = part * line; i < elements; i += parts * line) {
            __builtin_prefetch(from + i, 0, 2);
        }
    }

    // Tokens that a row may not see, and the padding behind the last token.
    static void mask(const AttendItem& item, const DecodeTile& tile, const DecodeRows& rows,
                     float* scores) {
        const int end = static_cast<int>(round_up(tile.count, tokens));
        for (int r = 0; r < R; ++r) {
            const std::int64_t seen = visible(item, rows.first_row + r) - tile.begin;
            int t = tile.count;
            if (seen < t) t = seen < 0 ? 0 : static_cast<int>(seen);
            for (; t < end; ++t) {
                scores[t / tokens * Isa::width + r * tokens + t % tokens] = -__builtin_inff();
            }
        }
    }

    // Scores to weights, exp2(s - max), in place. What the maximum's rise leaves of older weights
    // goes to `decay`, lanes as in the scores.
    static void softmax(const DecodeTile& tile, const DecodeRows& rows, float* weights,
                        float* decay) {
        const int end = static_cast<int>(round_up(tile.count, tokens)) * R;
        const f32 old_max = Isa::template load<f32>(rows.max);
        f32 max = old_max;
        for (int i = 0; i < end; i += Isa::width) {
            max = Isa::max(max, Isa::template load<f32>(weights + i));
        }
        max = simd::max_of_group<Isa, tokens>(max);
        // A row that has seen nothing yet: -inf - -inf would not be a number.
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
                           const T* const* next, const DecodeRows& rows, const float* weights,
                           const float* decay) {
        const int head_dim = dim ? dim : item.geometry.head_dim;
        for (int r = 0; r < R; ++r) {
            float* row = rows.values + r * rows.stride;
            for (int i = 0; i < rows.stride; i += Isa::width) {
                Isa::store(row + i, Isa::template load<f32>(row + i) * decay[r * tokens]);
            }
        }
        for (int g = 0; g < tile.group_count(); ++g) {
            const float* weight = weights + g * kGroup * R / Op::per_lane;
            const int count = static_cast<int>(round_up(tile.tokens_in(g), tokens));
            add_group(head_dim, values[g], next ? next[g] : nullptr, count, weight, rows);
        }
    }

    // One group, two rows at a time: so many that all dimensions fit the registers, and a row of
    // values is read from end to end. (In parts, memory would be read with gaps, which halves its
    // speed; the second time the group is in the L1 cache.)
    static void add_group(int head_dim, const T* values, const T* next, int count,
                          const float* weights, const DecodeRows& rows) {
        constexpr int dims = Op::value_dims;
        constexpr int vectors = Isa::registers / 2 / rows_together;
        constexpr int most = (vectors < 8 ? vectors : 8) / Op::value_vectors;  // loads
        for (int r = 0; r < R; r += rows_together) {
            float* sums = rows.values + r * rows.stride;
            const float* weight = weights + r * tokens / Op::per_lane;
            int i = 0;
            const T* ahead = next;  // in the first of the loops only
            for (; i + most * dims <= head_dim; i += most * dims, ahead = nullptr) {
                add_values<most, false>(head_dim, values + i, ahead, r, count, weight, sums + i,
                                        rows.stride);
            }
            for (; i + dims <= head_dim; i += dims, ahead = nullptr) {
                add_values<1, false>(head_dim, values + i, ahead, r, count, weight, sums + i,
                                     rows.stride);
            }
            if (i < head_dim) {
                add_values<1, true>(head_dim, values + i, ahead, r, count, weight, sums + i,
                                    rows.stride);
            }
        }
    }

    template <int loads, bool tail>
    KVDB_INLINE static void add_values(int head_dim, const T* value, const T* next, int r,
                                       int count, const float* weight, float* sums_at,
                                       std::int64_t stride) {
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
            for (int t = 0; t < tokens; t += Op::per_lane, value += Op::per_lane * head_dim) {
                if (next) {
                    prefetch(next + (first + t) * head_dim, Op::per_lane * head_dim,
                             r / rows_together, R / rows_together);
                }
                f32 v[vectors];
                KVDB_UNROLL
                for (int i = 0; i < loads; ++i) {
                    const T* at = value + i * dims;
                    f32* into = v + i * Op::value_vectors;
                    if constexpr (tail) {
                        Op::load_values_tail(at, head_dim, head_dim % dims, into);
                    } else {
                        Op::load_values(at, head_dim, into);
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

// Rows go in batches of 4, 2 or 1; the last batch may carry an idle row.
template <class Isa, class T>
class Decode {
  public:
    static void run(const AttendItem& item) { Decode(item).run(); }

    static std::size_t scratch_floats(int head_dim, int heads, std::int64_t rows) {
        return heads *
                   (round_up(rows, 4) * round_up(head_dim, kLanePadding) + 2 * rows * Isa::width) +
               2 * Loaded::scratch_elements(head_dim);
    }

  private:
    using Loaded = Gathered<Isa, T, kDecodeGroups>;

    explicit Decode(const AttendItem& item)
        : item_(item),
          rows_(static_cast<int>(item.row_end - item.row_begin)),
          stride_(round_up(item.geometry.head_dim, kLanePadding)),
          query_(reinterpret_cast<float*>(item.scratch)),
          max_(query_ + item.heads * round_up(rows_, 4) * stride_),
          sum_(max_ + item.heads * rows_ * Isa::width),
          gathered_(sum_ + item.heads * rows_ * Isa::width) {}

    void run() {
        start();
        const std::int64_t last_seen = visible(item_, item_.row_end - 1);
        RunCursor cursor(item_.geometry, item_.run, item_.block, item_.token_begin,
                         item_.token_end < last_seen ? item_.token_end : last_seen);
        DecodeTile tiles[2];
        cursor.next(tiles[0]);
        if (tiles[0].count == 0) return end_sums();
        int step = 0;
        Loaded loaded = load(tiles[0], 0, step);
        for (int i = 0; tiles[i].count > 0; i ^= 1) {
            cursor.next(tiles[i ^ 1]);
            for (int head = 0; head < item_.heads; ++head) {
                const bool last = head + 1 == item_.heads;
                const DecodeTile& ahead = tiles[last ? i ^ 1 : i];
                const Loaded next = load(ahead, last ? 0 : head + 1, ++step);
                const bool prefetch = ahead.count == DecodeTile::tokens_max;
                attend(tiles[i], loaded, prefetch ? &next : nullptr, head);
                loaded = next;
            }
        }
        end_sums();
    }

    // Two tiles are loaded at a time, the one in use and the next.
    Loaded load(const DecodeTile& tile, int head, int step) const {
        auto* scratch = reinterpret_cast<T*>(gathered_);
        return Loaded(item_.geometry, tile, item_.kv_head + head,
                      scratch + step % 2 * Loaded::scratch_elements(item_.geometry.head_dim));
    }

    void attend(const DecodeTile& tile, const Loaded& loaded, const Loaded* next, int head) {
        for (int r = 0, batch; r < rows_; r += batch, next = nullptr) {
            batch = batch_rows(rows_ - r);
            const DecodeRows rows{query(head, r),       values(head, r),      stride_,
                                  lanes(max_, head, r), lanes(sum_, head, r), item_.row_begin + r};
            switch (item_.geometry.head_dim) {
                case 64:
                    step<64>(batch, tile, loaded, next, rows);
                    break;
                case 128:
                    step<128>(batch, tile, loaded, next, rows);
                    break;
                default:
                    step<0>(batch, tile, loaded, next, rows);
                    break;
            }
        }
    }

    template <int dim>
    void step(int batch, const DecodeTile& tile, const Loaded& loaded, const Loaded* next,
              const DecodeRows& rows) {
        switch (batch) {
            case 1:
                return DecodeStep<Isa, T, 1, dim>::run(item_, tile, loaded, next, rows);
            case 2:
                return DecodeStep<Isa, T, 2, dim>::run(item_, tile, loaded, next, rows);
            default:
                return DecodeStep<Isa, T, 4, dim>::run(item_, tile, loaded, next, rows);
        }
    }

    void start() {
        clear(query_, item_.heads * round_up(rows_, 4) * stride_, 0.0f);
        clear(max_, item_.heads * rows_ * Isa::width, -__builtin_inff());
        clear(sum_, item_.heads * rows_ * Isa::width, 0.0f);
        for (int head = 0; head < item_.heads; ++head) {
            clear(values(head, 0), round_up(rows_, 4) * stride_, 0.0f);
            for (int r = 0; r < rows_; ++r) {
                load_row<Isa, T>(query(head, r),
                                 row_of<const T>(item_.query, item_, head, item_.row_begin + r),
                                 item_.geometry.head_dim);
            }
        }
    }

    // From lanes to rows.
    void end_sums() {
        for (int head = 0; head < item_.heads; ++head) {
            for (int r = 0, batch; r < rows_; r += batch) {
                batch = batch_rows(rows_ - r);
                const int tokens = Isa::width / batch;
                for (int j = 0; j < batch && r + j < rows_; ++j) {
                    Operand<Isa, T>::order_sums(values(head, r + j), item_.geometry.head_dim);
                    float sum = 0;
                    for (int t = 0; t < tokens; ++t) sum += lanes(sum_, head, r)[j * tokens + t];
                    const std::int64_t row = head * item_.state.rows + r + j;
                    item_.state.sum[row] = sum;
                    item_.state.max[row] = lanes(max_, head, r)[j * tokens];
                }
            }
        }
    }

    static int batch_rows(int left) { return left >= 3 ? 4 : left; }

    static void clear(float* at, std::int64_t count, float value) {
        for (std::int64_t i = 0; i < count; ++i) at[i] = value;
    }

    float* query(int head, int r) const {
        return query_ + (head * round_up(rows_, 4) + r) * stride_;
    }
    float* values(int head, int r) const {
        return item_.state.values + (head * item_.state.rows + r) * stride_;
    }
    float* lanes(float* of, int head, int r) const { return of + (head * rows_ + r) * Isa::width; }

    const AttendItem& item_;
    const int rows_;
    const std::int64_t stride_;
    float* const query_;
    float* const max_;
    float* const sum_;
    float* const gathered_;
};

}  // namespace kvdb::kernels
