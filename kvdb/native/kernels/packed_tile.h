// Keys and values of a tile of tokens in the layout in which prefill multiplies them.
#pragma once

#include "gathered.h"
#include "kernels.h"
#include "multiply.h"
#include "multiply_tiles.h"
#include "operand.h"

namespace kvdb::kernels {

template <class Isa, class T, int groups>
class PackedTile {
    using f32 = typename Isa::f32;
    using Op = Operand<Isa, T>;
    using Product = Multiply<Isa, T>;
    static constexpr int tile_tokens = groups * kGroup;

  public:
    static constexpr int panel = Isa::tile_vectors * Isa::width;
    static_assert(tile_tokens % panel == 0 && panel % (Product::depth_step * Op::per_lane) == 0);

    static std::size_t scratch_floats(const Geometry& geometry) {
        return std::size_t{tile_tokens} * (round_up(geometry.head_dim, kLanePadding) +
                                           round_up(geometry.value_dim, kLanePadding));
    }

    PackedTile(const Geometry& geometry, float* scratch)
        : head_dim_(geometry.head_dim),
          value_dim_(geometry.value_dim),
          value_stride_(geometry.value_stride()),
          lanes_(head_dim_ / Op::per_lane),
          depth_(static_cast<int>(round_up(lanes_, Product::depth_step))),
          keys_(scratch),
          values_(scratch + tile_tokens * round_up(head_dim_, kLanePadding)) {}

    void pack(const Tile<groups>& tile, const Gathered<Isa, T, groups>& loaded) {
        pack_keys(tile, loaded);
        pack_values(tile, loaded);
    }

    // Lanes of the product before the softmax: a row's, and zeros behind them.
    int depth() const { return depth_; }
    // The panel of keys that begins with a token: [depth][panel].
    const float* keys(int token) const { return keys_ + token * depth_; }
    // The panel of values that begins with a dimension, [tokens / per_lane][its width], from one of
    // its rows on.
    const float* values(int dim, int row) const {
        return values_ + dim * value_depth_ + row * panel_width(dim);
    }
    int value_vectors(int dim) const { return panel_width(dim) / Isa::width; }

  private:
    // To panels [depth][panel] of tokens.
    void pack_keys(const Tile<groups>& tile, const Gathered<Isa, T, groups>& loaded) {
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
    void pack_values(const Tile<groups>& tile, const Gathered<Isa, T, groups>& loaded) {
        const int packed = tile.group_count() * kGroup / Op::per_lane;
        value_depth_ = static_cast<int>(round_up(packed, Product::depth_step));
        const int floats = value_depth_ * static_cast<int>(round_up(value_dim_, kLanePadding));
        for (int i = packed * panel_width(0); packed < value_depth_ && i < floats; ++i) {
            values_[i] = 0;
        }
        for (int k = 0; k < packed; ++k) {
            const int token = k * Op::per_lane;
            const T* value = loaded.values[token / kGroup] + token % kGroup * value_stride_;
            for (int d = 0; d < value_dim_; d += Op::value_dims) {
                f32 v[Op::value_vectors];
                if (d + Op::value_dims <= value_dim_) {
                    Op::load_values(value + d, value_stride_, v);
                } else {
                    Op::load_values_tail(value + d, value_stride_, value_dim_ - d, v);
                }
                for (int i = 0; i < Op::value_vectors; ++i) {
                    const int dim = d + i * Isa::width;
                    const int first = dim / panel * panel;
                    Isa::store(
                        values_ + first * value_depth_ + k * panel_width(first) + dim - first,
                        v[i]);
                }
            }
        }
    }

    int panel_width(int first_dim) const {
        const auto left = static_cast<int>(round_up(value_dim_, Op::value_dims)) - first_dim;
        return left < panel ? left : panel;
    }

    const int head_dim_, value_dim_, value_stride_;
    const int lanes_;
    const int depth_;
    float* const keys_;
    float* const values_;
    int value_depth_ = 0;
};

}  // namespace kvdb::kernels
