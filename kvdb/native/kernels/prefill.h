// Attention of many rows: keys and values are packed once for all rows of an item, and two matrix
// products with a softmax between them run over a tile of tokens at a time.
//
// A lane is one float or one pair of bfloat16 (see operand.h); the same matrix kernel serves both.
// Each lane sums its products in the order of the tokens, and lanes never mix, so results do not
// depend on the number of threads.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "packed_tile.h"
#include "read_ahead.h"
#include "rotate.h"

namespace kvdb::kernels {

template <class Isa, class T>
class Prefill {
    using f32 = typename Isa::f32;
    using i32 = typename Isa::i32;
    using Op = Operand<Isa, T>;
    using Product = Multiply<Isa, T>;
    static constexpr int groups = 16;  // with fewer, sums are loaded and stored more often
    static constexpr int tile_tokens = groups * kGroup;
    static constexpr int block_rows = Product::block_rows;
    using Packed = PackedTile<Isa, T, groups>;
    static constexpr int panel = Packed::panel;
    using PrefillTile = Tile<groups>;
    using Loaded = Gathered<Isa, T, groups>;

    static_assert(kPrefillRowPadding % Product::rows == 0 && block_rows % Product::rows == 0);
    static_assert(block_rows % Isa::width == 0 && kPrefillRowPadding % block_rows == 0);

  public:
    static void run(const AttendItem& item) { Prefill(item).run(); }

    static std::size_t scratch_floats(const Geometry& geometry, std::int64_t rows) {
        const std::int64_t stride = round_up(geometry.head_dim, kLanePadding);
        return round_up(rows, Product::rows) * stride + block_rows * tile_tokens + block_rows +
               Packed::scratch_floats(geometry) + Loaded::scratch_elements(geometry);
    }

  private:
    explicit Prefill(const AttendItem& item)
        : item_(item),
          rows_(item.row_end - item.row_begin),
          value_dim_(item.geometry.value_dim),
          query_stride_(round_up(item.geometry.head_dim, kLanePadding)),
          stride_(round_up(value_dim_, kLanePadding)),
          query_(reinterpret_cast<float*>(item.scratch)),
          scores_(query_ + round_up(rows_, Product::rows) * query_stride_),
          decay_(scores_ + block_rows * tile_tokens),
          packed_(item.geometry, decay_ + block_rows),
          gathered_(decay_ + block_rows + Packed::scratch_floats(item.geometry)) {}

    void run() {
        start();
        const std::int64_t last_seen = visible(item_, item_.row_end - 1);
        RunCursor cursor(item_.geometry, item_.run, item_.block, item_.token_begin,
                         item_.token_end < last_seen ? item_.token_end : last_seen);
        PrefillTile tiles[2];
        bool more = cursor.next(tiles[0]);
        for (int i = 0; more; i ^= 1) {
            more = cursor.next(tiles[i ^ 1]);
            if (!more) tiles[i ^ 1].count = 0;
            attend(tiles[i], tiles[i ^ 1]);
        }
        for (std::int64_t r = 0; r < rows_; ++r) {
            Op::order_sums(item_.state.values + r * stride_, value_dim_);
        }
    }

    // All rows over one tile, while the next one comes.
    void attend(const PrefillTile& tile, const PrefillTile& next) {
        const Loaded loaded(item_.geometry, tile, item_.kv_head, reinterpret_cast<T*>(gathered_));
        if (tile.view != view_) load_queries(tile);
        if (tile.any_hidden()) mark_hidden(tile);
        packed_.pack(tile, loaded);
        const std::int64_t key_steps = (packed_.depth() + kAheadDepth - 1) / kAheadDepth;
        const std::int64_t products =
            tile_tokens / panel * key_steps +
            value_dim_ / panel * (tile_tokens / Op::per_lane / kAheadDepth);
        ahead_.begin(item_.geometry, next, item_.kv_head, rows_ / Product::rows * products + 1);
        for (std::int64_t r = 0; r < rows_; r += block_rows) attend(tile, r);
    }

    void start() {
        const std::int64_t padded = round_up(rows_, Product::rows);
        for (std::int64_t i = 0; i < padded * query_stride_; ++i) query_[i] = 0;
        for (std::int64_t i = 0; i < padded * stride_; ++i) item_.state.values[i] = 0;
        for (std::int64_t r = 0; r < round_up(rows_, block_rows); ++r) {
            item_.state.max[r] = -__builtin_inff();
            item_.state.sum[r] = 0;
        }
        for (std::int64_t r = 0; r < rows_; ++r) load_query(r, -1);
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
        Rotate<Isa, T>::load_query(query_ + row * query_stride_,
                                   row_of<const T>(item_.query, item_, 0, item_.row_begin + row),
                                   item_, view);
    }

    void mark_hidden(const PrefillTile& tile) {
        for (int t = 0; t < tile_tokens; ++t) hidden_[t] = tile.hidden[t / 64] >> t % 64 & 1;
    }

    // Rows [first, first + block_rows) over one tile. What none of them sees is left out, in whole
    // panels at its beginning.
    void attend(const PrefillTile& tile, std::int64_t first) {
        const std::int64_t count = rows_ - first < block_rows ? rows_ - first : block_rows;
        const std::int64_t padded = round_up(count, Product::rows);
        const int tokens = seen(tile, first + count - 1), unseen = before(tile, first);
        if (unseen >= tokens) return;
        const int begin = unseen / panel * panel;
        for (int t = begin; t < tokens; t += panel) {
            each_product(count, [&](std::int64_t r, auto rows) {
                product_.template scaled<Isa::tile_vectors, rows.value>(
                    query_ + (first + r) * query_stride_, query_stride_, packed_.keys(t),
                    packed_.depth(), scores_ + r * tile_tokens + t, tile_tokens, item_.scale_log2e,
                    ahead_);
            });
        }
        for (std::int64_t r = 0; r < padded; r += Isa::width) {
            softmax(tile, begin, tokens, first + r, r, count - r);
        }

        const int skipped = begin / Op::per_lane;
        const int used = weights_end(tokens) / Op::per_lane - skipped;
        for (int d = 0; d < round_up(value_dim_, Op::value_dims); d += panel) {
            each_product(count, [&](std::int64_t r, auto rows) {
                add<rows.value>(packed_.value_vectors(d), scores_ + r * tile_tokens + skipped,
                                packed_.values(d, skipped), used,
                                item_.state.values + (first + r) * stride_ + d, decay_ + r);
            });
        }
    }

    // body(r, rows) for rows from r on, as many as a product takes: of `count`, with few idle ones
    // behind the last.
    template <class Body>
    KVDB_INLINE static void each_product(std::int64_t count, Body&& body) {
        constexpr int most = Product::rows, few = Product::rows_few;
        for (std::int64_t r = 0; r < count;) {
            const std::int64_t left = count - r;
            if (few < most && (left <= few || (left > most && left <= 2 * few))) {
                body(r, std::integral_constant<int, few>{});
                r += few;
            } else {
                body(r, std::integral_constant<int, most>{});
                r += most;
            }
        }
    }

    template <int rows>
    void add(int vectors, const float* weights, const float* values, int depth, float* to,
             const float* decay) {
        switch (vectors) {
            case 1:
                return product_.template added<1, rows>(weights, tile_tokens, values, depth, to,
                                                        stride_, decay, ahead_);
            case 2:
                return product_.template added<2, rows>(weights, tile_tokens, values, depth, to,
                                                        stride_, decay, ahead_);
            case 3:
                return product_.template added<3, rows>(weights, tile_tokens, values, depth, to,
                                                        stride_, decay, ahead_);
            default:
                return product_.template added<4, rows>(weights, tile_tokens, values, depth, to,
                                                        stride_, decay, ahead_);
        }
    }

    // The number of tokens of the tile that a row of the item sees.
    int seen(const PrefillTile& tile, std::int64_t row) const {
        const std::int64_t tokens = visible(item_, item_.row_begin + row) - tile.begin;
        return tokens < 0 ? 0 : tokens < tile.count ? static_cast<int>(tokens) : tile.count;
    }

    // The number of its first tokens that come before all that the row sees.
    int before(const PrefillTile& tile, std::int64_t row) const {
        if (!item_.begins) return 0;
        const std::int64_t tokens = first_visible(item_, item_.row_begin + row) - tile.begin;
        return tokens < 0 ? 0 : tokens < tile.count ? static_cast<int>(tokens) : tile.count;
    }

    // Tokens of a tile whose weights the product takes, where rows see the first `tokens`.
    static int weights_end(int tokens) {
        return static_cast<int>(round_up(tokens, Product::depth_step * Op::per_lane));
    }

    // Turns the scores of the next Isa::width rows, of which there are `left` (or none, behind the
    // last), into weights, in place, for tokens [begin, tokens) of the tile.
    void softmax(const PrefillTile& tile, int begin, int tokens, std::int64_t row,
                 std::int64_t local, std::int64_t left) {
        const int rows = left < Isa::width ? static_cast<int>(left < 0 ? 0 : left) : Isa::width;
        f32 each[Isa::width];
        int ends[Isa::width];
        for (int r = 0; r < Isa::width; ++r) each[r] = Isa::splat(-__builtin_inff());
        for (int r = 0; r < rows; ++r) {
            float* scores = scores_ + (local + r) * tile_tokens;
            const int own = seen(tile, row + r);
            ends[r] = static_cast<int>(round_up(own, Isa::width));
            for (int t = own; t < ends[r]; ++t) scores[t] = -__builtin_inff();
            const int unseen = before(tile, row + r);
            for (int t = begin; t < unseen && t < own; ++t) scores[t] = -__builtin_inff();
            if (tile.any_hidden()) hide(scores, begin, ends[r]);
            f32 largest = each[r];
            for (int t = begin; t < ends[r]; t += Isa::width) {
                largest = Isa::max(largest, Isa::template load<f32>(scores + t));
            }
            each[r] = largest;
        }
        const f32 before = Isa::template load<f32>(item_.state.max + row);
        const f32 max = Isa::max(before, simd::max_each<Isa>(each));
        // For a row that has seen nothing yet, -inf - -inf would be NaN.
        const f32 base = max == -__builtin_inff() ? f32{} : max;
        const f32 decay = simd::exp2<Isa>(before - base);
        Isa::store(item_.state.max + row, max);
        Isa::store(decay_ + local, decay);

        float bases[Isa::width];
        Isa::store(bases, base);
        for (int r = 0; r < Isa::width; ++r) each[r] = f32{};
        const int end = weights_end(tokens);
        for (int r = 0; r < rows; ++r) {
            float* scores = scores_ + (local + r) * tile_tokens;
            const f32 row_base = Isa::splat(bases[r]);
            f32 sum{};
            for (int t = begin; t < ends[r]; t += Isa::width) {
                const f32 weights = simd::exp2<Isa>(Isa::template load<f32>(scores + t) - row_base);
                Op::store_weights(scores, t, weights);
                sum += weights;
            }
            const int behind = ends[r] > begin ? ends[r] : begin;
            for (int t = behind; t < end; t += Isa::width) Op::store_weights(scores, t, f32{});
            each[r] = sum;
        }
        float* sums = item_.state.sum + row;
        Isa::store(sums, Isa::template load<f32>(sums) * decay + simd::sum_each<Isa>(each));
    }

    void hide(float* scores, int begin, int end) const {
        const f32 none = Isa::splat(-__builtin_inff());
        for (int t = begin; t < end; t += Isa::width) {
            const i32 hidden = Isa::template load<i32>(hidden_ + t);
            Isa::store(scores + t, hidden != 0 ? none : Isa::template load<f32>(scores + t));
        }
    }

    const AttendItem& item_;
    const std::int64_t rows_;
    const int value_dim_;
    const std::int64_t query_stride_;
    const std::int64_t stride_;  // of what is added up
    float* const query_;         // [rows][query_stride]
    float* const scores_;        // [block_rows][tile_tokens], then weights
    float* const decay_;         // [block_rows]
    Packed packed_;
    float* const gathered_;
    std::int32_t view_ = -1;
    Product product_;
    ReadAhead<Isa, groups> ahead_;
    alignas(64) std::int32_t hidden_[tile_tokens];  // 1 for a token that nobody sees
};

}  // namespace kvdb::kernels
