// Scores of tokens by the keys of an indexer: for each query the sum over its heads of
// weight * max(0, q . k).
//
// Keys are packed once for all heads and queries, tokens in lanes, and multiplied as in prefill.
// Products and sums are those of float32. Where the instruction set multiplies bfloat16, queries
// that are bfloat16 already are multiplied so. Others are not rounded: with tiles they are three
// numbers of bfloat16, whose sum they are and whose products are added up; elsewhere they are
// multiplied as floats.
#pragma once

#include "kernels.h"
#include "packed_tile.h"
#include "read_ahead.h"

namespace kvdb::kernels {

// The instruction set without products of bfloat16.
template <class Isa>
struct InFloats : Isa {
    static constexpr bool has_bf16_dot = false;
    static constexpr bool has_tiles = false;
};

template <class Isa, class T>
class Scores {
    using f32 = typename Isa::f32;
    using Op = Operand<Isa, T>;
    using Product = Multiply<Isa, T>;
    static constexpr int groups = 16;
    static constexpr int tile_tokens = groups * kGroup;
    using Packed = PackedTile<Isa, T, groups>;
    using ScoreTile = Tile<groups>;
    using Loaded = Gathered<Isa, T, groups>;
    static constexpr int panel = Packed::panel;
    static constexpr int vectors = Isa::tile_vectors;
    static constexpr bool in_halves = Op::per_lane == 2;
    static constexpr int parts_max = in_halves && Isa::has_tiles ? 3 : 1;

  public:
    static void run(const ScoreItem& item) {
        const bool exact = !in_halves || are_halves(item);
        if constexpr (in_halves && !Isa::has_tiles) {
            if (!exact) return Scores<InFloats<Isa>, T>::run(item);
        }
        Scores(item, exact ? 1 : parts_max).run();
    }

    static std::size_t scratch_floats(const Geometry& geometry, std::int64_t rows) {
        const std::int64_t padded = round_up(rows, Product::rows);
        const std::size_t floats =
            padded * (parts_max * round_up(geometry.head_dim, kLanePadding) + 1) +
            Product::rows * (panel + 1) + Packed::scratch_floats(geometry) +
            Loaded::scratch_elements(geometry);
        if constexpr (in_halves && !Isa::has_tiles) {
            const std::size_t other = Scores<InFloats<Isa>, T>::scratch_floats(geometry, rows);
            return floats > other ? floats : other;
        }
        return floats;
    }

  private:
    Scores(const ScoreItem& item, int parts)
        : item_(item),
          parts_(parts),
          rows_(item.heads * item.n),
          padded_(round_up(rows_, Product::rows)),
          stride_(round_up(item.geometry.head_dim, kLanePadding)),
          queries_(reinterpret_cast<float*>(item.scratch)),
          weights_(queries_ + parts * padded_ * stride_),
          products_(weights_ + padded_),
          ones_(products_ + Product::rows * panel),
          packed_(item.geometry, ones_ + Product::rows),
          gathered_(ones_ + Product::rows + Packed::scratch_floats(item.geometry)) {}

    // Whether every query is a number of bfloat16.
    static bool are_halves(const ScoreItem& item) {
        std::uint32_t low = 0;
        const std::int64_t numbers = item.n * item.geometry.head_dim;
        for (int head = 0; head < item.heads; ++head) {
            const float* row = item.queries + head * item.query_stride;
            for (std::int64_t i = 0; i < numbers; ++i) {
                low |= __builtin_bit_cast(std::uint32_t, row[i]);
            }
        }
        return (low & 0xffff) == 0;
    }

    void run() {
        load();
        RunCursor cursor(item_.geometry, item_.run, item_.block, item_.token_begin,
                         item_.token_end);
        ScoreTile tiles[2];
        bool more = cursor.next(tiles[0]);
        for (int i = 0; more; i ^= 1) {
            more = cursor.next(tiles[i ^ 1]);
            if (!more) tiles[i ^ 1].count = 0;
            score(tiles[i], tiles[i ^ 1]);
        }
    }

    // Row i * heads + h is query i of head h.
    void load() {
        for (std::int64_t i = 0; i < parts_ * padded_ * stride_; ++i) queries_[i] = 0;
        for (std::int64_t r = 0; r < padded_; ++r) weights_[r] = 0;
        for (int r = 0; r < Product::rows; ++r) ones_[r] = 1;
        for (std::int64_t row = 0; row < rows_; ++row) {
            const std::int64_t head = row % item_.heads, i = row / item_.heads;
            weights_[row] = item_.weights[head * item_.weight_stride + i];
            load_query(row,
                       item_.queries + head * item_.query_stride + i * item_.geometry.head_dim);
        }
    }

    void load_query(std::int64_t row, const float* from) {
        const int head_dim = item_.geometry.head_dim;
        if constexpr (!in_halves) {
            __builtin_memcpy(queries_ + row * stride_, from, head_dim * sizeof(float));
        } else {
            alignas(64) float left[kHeadDimMax + kLanePadding] = {};
            alignas(64) T halves[kHeadDimMax + kLanePadding];
            __builtin_memcpy(left, from, head_dim * sizeof(float));
            for (int part = 0; part < parts_; ++part) {
                for (int i = 0; i < head_dim; i += Isa::width) {
                    const f32 all = Isa::template load<f32>(left + i);
                    Isa::narrow(halves + i, all);
                    Isa::store(left + i, all - Isa::widen(halves + i));
                }
                load_row<Isa, T>(queries_ + (part * padded_ + row) * stride_, halves, head_dim);
            }
        }
    }

    // All rows over one tile, while the next one comes.
    void score(const ScoreTile& tile, const ScoreTile& next) {
        const Loaded loaded(item_.geometry, tile, 0, reinterpret_cast<T*>(gathered_));
        packed_.pack(tile, loaded);
        const std::int64_t depth_steps = (packed_.depth() + kAheadDepth - 1) / kAheadDepth;
        ahead_.begin(
            item_.geometry, next, 0,
            parts_ * padded_ / Product::rows * ((tile.count + panel - 1) / panel) * depth_steps);
        for (int t = 0; t < tile.count; t += panel) {
            float* out = item_.out + tile.begin + t;
            score(packed_.keys(t), tile.count - t < panel ? tile.count - t : panel, out);
        }
    }

    // All rows over the keys of a panel, of which `count` are tokens.
    void score(const float* keys, int count, float* out) {
        f32 sums[vectors] = {};
        int head = 0;
        for (std::int64_t first = 0; first < rows_; first += Product::rows) {
            multiply(first, keys);
            const std::int64_t left = rows_ - first;
            const int rows = left < Product::rows ? static_cast<int>(left) : Product::rows;
            for (int r = 0; r < rows; ++r) {
                const f32 weight = Isa::splat(weights_[first + r]);
                KVDB_UNROLL
                for (int i = 0; i < vectors; ++i) {
                    const float* products = products_ + r * panel + i * Isa::width;
                    sums[i] = Isa::fma(Isa::max(Isa::template load<f32>(products), f32{}), weight,
                                       sums[i]);
                }
                if (++head < item_.heads) continue;
                put(sums, count, out);
                out += item_.out_stride;
                head = 0;
            }
        }
    }

    KVDB_INLINE void multiply(std::int64_t row, const float* keys) {
        product_.template scaled<vectors, Product::rows>(queries_ + row * stride_, stride_, keys,
                                                         packed_.depth(), products_, panel, 1.0f,
                                                         ahead_);
        for (int part = 1; part < parts_; ++part) {
            product_.template added<vectors, Product::rows>(
                queries_ + (part * padded_ + row) * stride_, stride_, keys, packed_.depth(),
                products_, panel, ones_, ahead_);
        }
    }

    // Writes the sums of one query, and clears them.
    KVDB_INLINE static void put(f32 (&sums)[vectors], int count, float* out) {
        if (count == panel) {
            KVDB_UNROLL
            for (int i = 0; i < vectors; ++i) Isa::store(out + i * Isa::width, sums[i]);
        } else {
            alignas(64) float last[panel];
            KVDB_UNROLL
            for (int i = 0; i < vectors; ++i) Isa::store(last + i * Isa::width, sums[i]);
            __builtin_memcpy(out, last, count * sizeof(float));
        }
        KVDB_UNROLL
        for (int i = 0; i < vectors; ++i) sums[i] = f32{};
    }

    const ScoreItem& item_;
    const int parts_;
    const std::int64_t rows_, padded_, stride_;
    float* const queries_;   // [parts][padded][stride], operand lanes
    float* const weights_;   // [padded]
    float* const products_;  // [Product::rows][panel]
    float* const ones_;      // [Product::rows]
    Packed packed_;
    float* const gathered_;
    Product product_;
    ReadAhead<Isa, groups> ahead_;
};

}  // namespace kvdb::kernels
