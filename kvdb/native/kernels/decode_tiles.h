// Attention of a few rows by matrix tiles: keys are the left factor as they lie in the blocks, 16
// tokens x 32 dimensions, and all rows of a KV head, up to 16, the columns of the right one.
//
// Scores of a token are one vector, a lane for each row, so that the softmax needs no sums over
// lanes. Weights are transposed for the second product, and values interleaved on the way.
#pragma once

#include "decode_walk.h"
#include "kernels.h"
#include "operand.h"
#include "rotate.h"

namespace kvdb::kernels {

template <class Isa>
class DecodeTiles : DecodeWalk<DecodeTiles<Isa>, Isa, BFloat16> {
    using Walk = DecodeWalk<DecodeTiles, Isa, BFloat16>;
    using Loaded = typename Walk::Loaded;
    using Walk::item_;
    friend Walk;

    using f32 = typename Isa::f32;
    using i32 = typename Isa::i32;
    using Op = Operand<Isa, BFloat16>;
    static constexpr int rows_max = simd::kTileRows;
    static constexpr int tile = simd::kTileLanes;  // lanes; twice as many elements
    static constexpr int halves = kDecodeGroups / 2;
    static_assert(kGroup == rows_max && kDecodeRowsMax == rows_max && Isa::width == tile);

  public:
    // Whether rows are whole tiles: what lies behind a row must not be multiplied.
    static bool takes(const Geometry& geometry) {
        return geometry.head_dim % (2 * tile) == 0 && geometry.value_dim % (2 * tile) == 0;
    }

    static void run(const AttendItem& item) { DecodeTiles(item).run(); }

    static std::size_t scratch_floats(const Geometry& geometry, int heads) {
        return std::size_t{1} * heads * rows_max * (geometry.head_dim / 2 + 2) +
               values_floats(geometry.value_dim) + 2 * Loaded::scratch_elements(geometry);
    }

  private:
    static std::size_t values_floats(int value_dim) {
        return std::size_t{kDecodeGroups} * kGroup / 2 * value_dim;
    }

    explicit DecodeTiles(const AttendItem& item)
        : Walk(item),
          rows_(static_cast<int>(item.row_end - item.row_begin)),
          head_dim_(item.geometry.head_dim),
          value_dim_(item.geometry.value_dim),
          value_stride_(item.geometry.value_stride()),
          query_(reinterpret_cast<float*>(item.scratch)),
          max_(query_ + item.heads * rows_max * head_dim_ / 2),
          sum_(max_ + item.heads * rows_max),
          values_(sum_ + item.heads * rows_max),
          gathered_(values_ + values_floats(value_dim_)) {}

    void run() {
        const std::int64_t floats = std::int64_t{item_.heads} * item_.state.rows * value_dim_;
        for (std::int64_t i = 0; i < floats; ++i) item_.state.values[i] = 0;
        for (int i = 0; i < item_.heads * rows_max; ++i) {
            max_[i] = -__builtin_inff();
            sum_[i] = 0;
        }
        load_queries(-1);
        Walk::walk(reinterpret_cast<BFloat16*>(gathered_));
        for (int head = 0; head < item_.heads; ++head) {
            for (int r = 0; r < rows_; ++r) {
                Op::order_sums(state(head) + r * value_dim_, value_dim_);
                item_.state.max[head * item_.state.rows + r] = max_[head * rows_max + r];
                item_.state.sum[head * item_.state.rows + r] = sum_[head * rows_max + r];
            }
        }
    }

    // Queries, rotated for the keys of a view, to [heads][pairs of dimensions][rows].
    void load_queries(std::int32_t view) {
        alignas(64) float lanes[rows_max][kHeadDimMax / 2];
        for (int r = rows_; r < rows_max; ++r) {
            for (int i = 0; i < head_dim_ / 2; i += tile) Isa::store(lanes[r] + i, f32{});
        }
        for (int head = 0; head < item_.heads; ++head) {
            for (int r = 0; r < rows_; ++r) {
                const auto* row =
                    row_of<const BFloat16>(item_.query, item_, head, item_.row_begin + r);
                Rotate<Isa, BFloat16>::load_query(lanes[r], row, item_, view);
            }
            for (int lane = 0; lane < head_dim_ / 2; lane += tile) {
                f32 square[rows_max];
                KVDB_UNROLL
                for (int r = 0; r < rows_max; ++r) {
                    square[r] = Isa::template load<f32>(lanes[r] + lane);
                }
                simd::transpose<Isa>(square);
                KVDB_UNROLL
                for (int i = 0; i < tile; ++i) {
                    Isa::store(query(head) + (lane + i) * rows_max, square[i]);
                }
            }
        }
    }

    void attend(const DecodeTile& tokens, const Loaded& loaded, const Loaded* next, int head) {
        alignas(64) float scores[DecodeTile::tokens_max * rows_max];
        alignas(64) BFloat16 weights[halves][rows_max][2 * tile];
        score(tokens, loaded.keys, head, scores);
        scale(tokens, scores);
        if (next) prefetch(next->keys, head_dim_);
        mask(tokens, scores);
        softmax(tokens, head, scores);
        transpose(tokens, scores, weights);
        interleave(tokens, loaded.values);
        if (next && !item_.geometry.values_in_keys) prefetch(next->values, value_dim_);
        accumulate(tokens, weights, state(head));
    }

    // Into the L2 cache.
    static void prefetch(const BFloat16* const* groups, int row_elements) {
        const int elements = kGroup * row_elements;
        for (int g = 0; g < kDecodeGroups; ++g) {
            for (int i = 0; i < elements; i += 32) __builtin_prefetch(groups[g] + i, 0, 2);
        }
    }

    // scores[token][row] = q_row . k_token. Four groups at a time, so that products overlap.
    void score(const DecodeTile& tokens, const BFloat16* const* keys, int head, float* scores) {
        static_assert(kDecodeGroups == 4);
        const int groups = tokens.group_count();
        tiles_.template zero<0>();
        tiles_.template zero<1>();
        tiles_.template zero<2>();
        tiles_.template zero<3>();
        for (int lane = 0; lane < head_dim_ / 2; lane += tile) {
            tiles_.template load<7>(query(head) + lane * rows_max, rows_max * sizeof(float));
            multiply<0>(keys[0] + 2 * lane);
            if (groups > 1) multiply<1>(keys[1] + 2 * lane);
            if (groups > 2) multiply<2>(keys[2] + 2 * lane);
            if (groups > 3) multiply<3>(keys[3] + 2 * lane);
        }
        constexpr int each = kGroup * rows_max;
        tiles_.template store<0>(scores, rows_max * sizeof(float));
        tiles_.template store<1>(scores + each, rows_max * sizeof(float));
        tiles_.template store<2>(scores + 2 * each, rows_max * sizeof(float));
        tiles_.template store<3>(scores + 3 * each, rows_max * sizeof(float));
    }

    template <int group>
    KVDB_INLINE void multiply(const BFloat16* keys) {
        constexpr int left = 4 + group % 3;
        tiles_.template load<left>(keys, head_dim_ * sizeof(BFloat16));
        tiles_.template dot_pairs<group, left, 7>();
    }

    void scale(const DecodeTile& tokens, float* scores) const {
        for (int i = 0; i < tokens.group_count() * kGroup * rows_max; i += rows_max) {
            Isa::store(scores + i, Isa::template load<f32>(scores + i) * item_.scale_log2e);
        }
    }

    // Masks tokens that a row may not see, and the padding behind the last token. An idle row sees
    // what the last row sees.
    void mask(const DecodeTile& tokens, float* scores) const {
        const int end = tokens.group_count() * kGroup;
        i32 seen{};
        int least = end;
        for (int r = 0; r < rows_max; ++r) {
            const std::int64_t row = item_.row_begin + (r < rows_ ? r : rows_ - 1);
            const std::int64_t count = visible(item_, row) - tokens.begin;
            seen[r] = count < 0 ? 0 : count < tokens.count ? static_cast<int>(count) : tokens.count;
            if (seen[r] < least) least = seen[r];
        }
        const f32 none = Isa::splat(-__builtin_inff());
        for (int t = least; t < end; ++t) {
            float* at = scores + t * rows_max;
            Isa::store(at, seen > t ? Isa::template load<f32>(at) : none);
        }
        if (item_.begins) mask_before(tokens, scores);
        if (!tokens.any_hidden()) return;
        static_assert(DecodeTile::tokens_max <= 64);
        for (std::uint64_t bits = tokens.hidden[0]; bits; bits &= bits - 1) {
            Isa::store(scores + __builtin_ctzll(bits) * rows_max, none);
        }
    }

    // Masks tokens before the first that a row sees.
    void mask_before(const DecodeTile& tokens, float* scores) const {
        i32 first{};
        int most = 0;
        for (int r = 0; r < rows_max; ++r) {
            const std::int64_t row = item_.row_begin + (r < rows_ ? r : rows_ - 1);
            const std::int64_t count = first_visible(item_, row) - tokens.begin;
            first[r] = count < 0              ? 0
                       : count < tokens.count ? static_cast<int>(count)
                                              : tokens.count;
            if (first[r] > most) most = first[r];
        }
        const f32 none = Isa::splat(-__builtin_inff());
        for (int t = 0; t < most; ++t) {
            float* at = scores + t * rows_max;
            Isa::store(at, first > t ? none : Isa::template load<f32>(at));
        }
    }

    // Turns scores into weights, exp2(s - max), in place; shrinks what was added up by an
    // older maximum.
    void softmax(const DecodeTile& tokens, int head, float* scores) {
        const int end = tokens.group_count() * kGroup * rows_max;
        float *row_max = max_ + head * rows_max, *row_sum = sum_ + head * rows_max;
        const f32 old_max = Isa::template load<f32>(row_max);
        f32 max = old_max;
        for (int i = 0; i < end; i += rows_max) {
            max = Isa::max(max, Isa::template load<f32>(scores + i));
        }
        // For a row that has seen nothing yet, -inf - -inf would be NaN.
        const f32 base = max == -__builtin_inff() ? f32{} : max;
        const f32 rise = simd::exp2<Isa>(old_max - base);
        f32 sum = Isa::template load<f32>(row_sum) * rise;
        for (int i = 0; i < end; i += rows_max) {
            const f32 weight = simd::exp2<Isa>(Isa::template load<f32>(scores + i) - base);
            Isa::store(scores + i, weight);
            sum += weight;
        }
        Isa::store(row_max, max);
        Isa::store(row_sum, sum);
        for (int r = 0; r < rows_; ++r) {
            if (rise[r] == 1) continue;
            float* row = state(head) + r * value_dim_;
            for (int i = 0; i < value_dim_; i += Isa::width) {
                Isa::store(row + i, Isa::template load<f32>(row + i) * rise[r]);
            }
        }
    }

    // To [halves][rows][32 tokens], zeros behind the last group.
    static void transpose(const DecodeTile& tokens, const float* scores,
                          BFloat16 (*weights)[rows_max][2 * tile]) {
        for (int g = 0; g < kDecodeGroups; ++g) {
            f32 square[kGroup] = {};
            KVDB_UNROLL
            for (int t = 0; t < kGroup; ++t) {
                if (g >= tokens.group_count()) continue;
                square[t] = Isa::template load<f32>(scores + (g * kGroup + t) * rows_max);
            }
            simd::transpose<Isa>(square);
            KVDB_UNROLL
            for (int r = 0; r < rows_max; ++r) {
                Isa::narrow(weights[g / 2][r] + g % 2 * kGroup, square[r]);
            }
        }
    }

    // To [pairs of tokens][value_dim], zeros behind the last group.
    void interleave(const DecodeTile& tokens, const BFloat16* const* values) {
        float* to = values_;
        for (int g = 0; g < 2 * used_halves(tokens); ++g) {
            for (int pair = 0; pair < kGroup / 2; ++pair, to += value_dim_) {
                for (int d = 0; d < value_dim_; d += Op::value_dims) {
                    f32 v[2] = {};
                    if (g < tokens.group_count()) {
                        Op::load_values(values[g] + 2 * pair * value_stride_ + d, value_stride_, v);
                    }
                    Isa::store(to + d, v[0]);
                    Isa::store(to + d + Isa::width, v[1]);
                }
            }
        }
    }

    static int used_halves(const DecodeTile& tokens) { return (tokens.group_count() + 1) / 2; }

    // state[row] += the sum over tokens of weight * value
    void accumulate(const DecodeTile& tokens, const BFloat16 (*weights)[rows_max][2 * tile],
                    float* state) {
        const std::int64_t stride = value_dim_ * sizeof(float);
        for (int d = 0; d < value_dim_; d += 2 * tile) {
            tiles_.template load<0>(state + d, stride);
            tiles_.template load<1>(state + d + tile, stride);
            for (int half = 0; half < used_halves(tokens); ++half) {
                const float* values = values_ + half * kGroup * value_dim_ + d;
                tiles_.template load<4>(weights[half], 2 * tile * sizeof(BFloat16));
                tiles_.template load<5>(values, stride);
                tiles_.template load<6>(values + tile, stride);
                tiles_.template dot_pairs<0, 4, 5>();
                tiles_.template dot_pairs<1, 4, 6>();
            }
            tiles_.template store<0>(state + d, stride);
            tiles_.template store<1>(state + d + tile, stride);
        }
    }

    float* query(int head) const { return query_ + head * rows_max * head_dim_ / 2; }
    float* state(int head) const {
        return item_.state.values + head * item_.state.rows * value_dim_;
    }

    const int rows_;
    const int head_dim_, value_dim_, value_stride_;
    float* const query_;   // [heads][pairs of dimensions][rows_max]
    float* const max_;     // [heads][rows_max]
    float* const sum_;     // [heads][rows_max]
    float* const values_;  // [pairs of tokens][value_dim] of one tile
    float* const gathered_;
    typename Isa::Tiles tiles_;
};

}  // namespace kvdb::kernels
