// Attention of many rows: keys and values are packed once for all rows of an item, and two matrix
// products with a softmax between them run over a tile of tokens at a time.
//
// A lane is one float or one pair of bfloat16 (see operand.h); the same matrix kernel serves both.
// Each lane sums its products in the order of the tokens, and lanes never mix, so results do not
// depend on the number of threads.
#pragma once

#include "../kernels.h"
#include "gathered.h"
#include "multiply.h"
#include "multiply_tiles.h"
#include "operand.h"
#include "rotate.h"

namespace kvdb::kernels {

template <class Isa, class T>
class Prefill {
    using f32 = typename Isa::f32;
    using i32 = typename Isa::i32;
    using Op = Operand<Isa, T>;
    using Product = Multiply<Isa, T>;
    static constexpr int groups = 8;
    static constexpr int tile_tokens = groups * kGroup;
    static constexpr int block_rows = Product::block_rows;
    static constexpr int panel = Isa::tile_vectors * Isa::width;
    using PrefillTile = Tile<groups>;
    using Loaded = Gathered<Isa, T, groups>;

    static_assert(kPrefillRowPadding % Product::rows == 0 && block_rows % Product::rows == 0);
    static_assert(tile_tokens % panel == 0 && panel % Isa::width == 0);

  public:
    static void run(const AttendItem& item) { Prefill(item).run(); }

    static std::size_t scratch_floats(int head_dim, std::int64_t rows) {
        const std::int64_t stride = round_up(head_dim, kLanePadding);
        return round_up(rows, Product::rows) * stride + 2 * tile_tokens * stride +
               block_rows * tile_tokens + block_rows + Loaded::scratch_elements(head_dim);
    }

  private:
    explicit Prefill(const AttendItem& item)
        : item_(item),
          rows_(item.row_end - item.row_begin),
          head_dim_(item.geometry.head_dim),
          lanes_(head_dim_ / Op::per_lane),
          depth_(static_cast<int>(round_up(lanes_, Product::depth_step))),
          stride_(round_up(head_dim_, kLanePadding)),
          query_(reinterpret_cast<float*>(item.scratch)),
          keys_(query_ + round_up(rows_, Product::rows) * stride_),
          values_(keys_ + tile_tokens * stride_),
          scores_(values_ + tile_tokens * stride_),
          decay_(scores_ + block_rows * tile_tokens),
          gathered_(decay_ + block_rows) {}

    void run() {
        start();
        const std::int64_t last_seen = visible(item_, item_.row_end - 1);
        RunCursor cursor(item_.geometry, item_.run, item_.block, item_.token_begin,
                         item_.token_end < last_seen ? item_.token_end : last_seen);
        for (PrefillTile tile; cursor.next(tile);) {
            const Loaded loaded(item_.geometry, tile, item_.kv_head,
                                reinterpret_cast<T*>(gathered_));
            if (tile.view != view_) load_queries(tile);
            if (tile.any_hidden()) mark_hidden(tile);
            pack_keys(tile, loaded);
            pack_values(tile, loaded);
            for (std::int64_t r = 0; r < rows_; r += block_rows) attend(tile, r);
        }
        for (std::int64_t r = 0; r < rows_; ++r) {
            Op::order_sums(item_.state.values + r * stride_, head_dim_);
        }
    }

    void start() {
        const std::int64_t padded = round_up(rows_, Product::rows);
        for (std::int64_t i = 0; i < padded * stride_; ++i) query_[i] = 0;
        for (std::int64_t i = 0; i < padded * stride_; ++i) item_.state.values[i] = 0;
        for (std::int64_t r = 0; r < rows_; ++r) {
            item_.state.max[r] = -__builtin_inff();
            item_.state.sum[r] = 0;
            load_query(r, -1);
        }
    }

    // Queries, rotated for the keys of the tile's view. A row that sees nothing of this tile sees
    // nothing behind it either.
    void load_queries(const PrefillTile& tile) {
        view_ = tile.view;
        for (std::int64_t r = 0; r < rows_; ++r) {
            if (seen(tile, r) > 0) load_query(r, view_);
        }
    }

    void load_query(std::int64_t row, std::int32_t view) {
        Rotate<Isa, T>::load_query(query_ + row * stride_,
                                   row_of<const T>(item_.query, item_, 0, item_.row_begin + row),
                                   item_, view);
    }

    void mark_hidden(const PrefillTile& tile) {
        for (int t = 0; t < tile_tokens; ++t) hidden_[t] = tile.hidden[t / 64] >> t % 64 & 1;
    }

    // To panels [depth][panel] of tokens.
    void pack_keys(const PrefillTile& tile, const Loaded& loaded) {
        for (int token = 0; token < tile.group_count() * kGroup; token += Isa::width) {
            const T* key = loaded.keys[token / kGroup] + token % kGroup * head_dim_;
            float* to = keys_ + token / panel * panel * depth_ + token % panel;
            for (int lane = 0; lane < lanes_; lane += Isa::width) {
                f32 square[Isa::width];
                const int lanes = lanes_ - lane < Isa::width ? lanes_ - lane : Isa::width;
                const T* at = key + lane * Op::per_lane;
                KVDB_UNROLL
                for (int t = 0; t < Isa::width; ++t) {
                    square[t] = lanes == Isa::width ? Op::load(at + t * head_dim_)
                                                    : Op::load_tail(at + t * head_dim_, lanes);
                }
                simd::transpose<Isa>(square);
                KVDB_UNROLL
                for (int i = 0; i < Isa::width; ++i) {
                    if (lane + i < depth_) Isa::store(to + (lane + i) * panel, square[i]);
                }
            }
        }
    }

    // To panels [tokens / per_lane][panel] of dimensions; the last may be narrower.
    void pack_values(const PrefillTile& tile, const Loaded& loaded) {
        const int depth = value_depth(tile);
        const int packed = tile.group_count() * kGroup / Op::per_lane;
        for (int i = packed * panel_width(0); packed < depth && i < depth * stride_; ++i) {
            values_[i] = 0;
        }
        for (int k = 0; k < packed; ++k) {
            const int token = k * Op::per_lane;
            const T* value = loaded.values[token / kGroup] + token % kGroup * head_dim_;
            for (int d = 0; d < head_dim_; d += Op::value_dims) {
                f32 v[Op::value_vectors];
                if (d + Op::value_dims <= head_dim_) {
                    Op::load_values(value + d, head_dim_, v);
                } else {
                    Op::load_values_tail(value + d, head_dim_, head_dim_ - d, v);
                }
                for (int i = 0; i < Op::value_vectors; ++i) {
                    const int dim = d + i * Isa::width;
                    const int first = dim / panel * panel;
                    Isa::store(values_ + first * depth + k * panel_width(first) + dim - first,
                               v[i]);
                }
            }
        }
    }

    // Of the product behind the softmax.
    static int value_depth(const PrefillTile& tile) {
        const int packed = tile.group_count() * kGroup / Op::per_lane;
        return static_cast<int>(round_up(packed, Product::depth_step));
    }

    int panel_width(int first_dim) const {
        const auto left = static_cast<int>(round_up(head_dim_, Op::value_dims)) - first_dim;
        return left < panel ? left : panel;
    }

    // Rows [first, first + block_rows) over one tile.
    void attend(const PrefillTile& tile, std::int64_t first) {
        const std::int64_t count = rows_ - first < block_rows ? rows_ - first : block_rows;
        const std::int64_t padded = round_up(count, Product::rows);
        const int tokens = seen(tile, first + count - 1);
        if (tokens == 0) return;
        for (int t = 0; t < tokens; t += panel) {
            for (std::int64_t r = 0; r < padded; r += Product::rows) {
                product_.template scaled<Isa::tile_vectors>(
                    query_ + (first + r) * stride_, stride_, keys_ + t * depth_, depth_,
                    scores_ + r * tile_tokens + t, tile_tokens, item_.scale_log2e);
            }
        }
        for (std::int64_t r = 0; r < count; ++r) softmax(tile, tokens, first + r, r);
        for (std::int64_t r = count; r < padded; ++r) decay_[r] = 0;

        const int depth = value_depth(tile);
        const int used = weights_end(tokens) / Op::per_lane;
        for (int d = 0; d < round_up(head_dim_, Op::value_dims); d += panel) {
            for (std::int64_t r = 0; r < padded; r += Product::rows) {
                add(panel_width(d) / Isa::width, scores_ + r * tile_tokens, values_ + d * depth,
                    used, item_.state.values + (first + r) * stride_ + d, decay_ + r);
            }
        }
    }

    void add(int vectors, const float* weights, const float* values, int depth, float* to,
             const float* decay) {
        switch (vectors) {
            case 1:
                return product_.template added<1>(weights, tile_tokens, values, depth, to, stride_,
                                                  decay);
            case 2:
                return product_.template added<2>(weights, tile_tokens, values, depth, to, stride_,
                                                  decay);
            case 3:
                return product_.template added<3>(weights, tile_tokens, values, depth, to, stride_,
                                                  decay);
            default:
                return product_.template added<4>(weights, tile_tokens, values, depth, to, stride_,
                                                  decay);
        }
    }

    // The number of tokens of the tile that a row of the item sees.
    int seen(const PrefillTile& tile, std::int64_t row) const {
        const std::int64_t tokens = visible(item_, item_.row_begin + row) - tile.begin;
        return tokens < 0 ? 0 : tokens < tile.count ? static_cast<int>(tokens) : tile.count;
    }

    // Tokens of a tile whose weights the product takes, where rows see the first `tokens`.
    static int weights_end(int tokens) {
        return static_cast<int>(round_up(tokens, Product::depth_step * Op::per_lane));
    }

    // Turns the scores of one row into weights, in place, for the first `tokens` of the tile.
    void softmax(const PrefillTile& tile, int tokens, std::int64_t row, std::int64_t local) {
        float* scores = scores_ + local * tile_tokens;
        const int own = seen(tile, row);
        const int own_end = static_cast<int>(round_up(own, Isa::width));
        for (int t = own; t < own_end; ++t) scores[t] = -__builtin_inff();
        if (tile.any_hidden()) hide(scores, own_end);

        float& row_max = item_.state.max[row];
        f32 largest = Isa::splat(row_max);
        for (int t = 0; t < own_end; t += Isa::width) {
            largest = Isa::max(largest, Isa::template load<f32>(scores + t));
        }
        const float max = simd::max_of_group<Isa, Isa::width>(largest)[0];
        // For a row that has seen nothing yet, -inf - -inf would be NaN.
        const float base = max == -__builtin_inff() ? 0.0f : max;
        decay_[local] = simd::exp2<Isa>(Isa::splat(row_max - base))[0];
        row_max = max;

        f32 sum{};
        for (int t = 0; t < own_end; t += Isa::width) {
            const f32 weights = simd::exp2<Isa>(Isa::template load<f32>(scores + t) - base);
            Op::store_weights(scores, t, weights);
            sum += weights;
        }
        const int end = weights_end(tokens);
        for (int t = own_end; t < end; t += Isa::width) Op::store_weights(scores, t, f32{});
        float& row_sum = item_.state.sum[row];
        row_sum = row_sum * decay_[local] + simd::sum_of_group<Isa, Isa::width>(sum)[0];
    }

    void hide(float* scores, int end) const {
        const f32 none = Isa::splat(-__builtin_inff());
        for (int t = 0; t < end; t += Isa::width) {
            const i32 hidden = Isa::template load<i32>(hidden_ + t);
            Isa::store(scores + t, hidden != 0 ? none : Isa::template load<f32>(scores + t));
        }
    }

    const AttendItem& item_;
    const std::int64_t rows_;
    const int head_dim_;
    const int lanes_;
    const int depth_;  // of the product before the softmax: lanes_, and zeros behind them
    const std::int64_t stride_;
    float* const query_;   // [rows][stride]
    float* const keys_;    // panels
    float* const values_;  // panels
    float* const scores_;  // [block_rows][tile_tokens], then weights
    float* const decay_;   // [block_rows]
    float* const gathered_;
    std::int32_t view_ = -1;
    Product product_;
    alignas(64) std::int32_t hidden_[tile_tokens];  // 1 for a token that nobody sees
};

}  // namespace kvdb::kernels
