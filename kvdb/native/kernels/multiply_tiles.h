// The matrix product of prefill, in tiles.
//
// Panels have the layout that tiles want already: a row of a panel of keys is the same pair of
// dimensions of its tokens, a row of a panel of values the same pair of tokens of its dimensions.
#pragma once

#include "multiply.h"

namespace kvdb::kernels {

template <class Isa>
    requires Isa::has_tiles
struct Multiply<Isa, BFloat16> {
  private:
    using f32 = typename Isa::f32;
    static constexpr int tile = simd::kTileLanes;

  public:
    static constexpr int rows = 2 * simd::kTileRows;
    static constexpr int rows_few = rows;
    static constexpr int block_rows = 96;
    static constexpr int depth_step = tile;

    template <int vectors, int R>
    void scaled(const float* a, std::int64_t a_stride, const float* b, std::int64_t depth, float* c,
                std::int64_t c_stride, float scale, auto& ahead) {
        static_assert(vectors % 2 == 0);
        for (int i = 0; i < vectors; i += 2) {
            tiles_.template zero<0>();
            tiles_.template zero<1>();
            tiles_.template zero<2>();
            tiles_.template zero<3>();
            accumulate<true>(a, a_stride, b + i * tile, vectors * tile, depth, ahead);
            store<true>(c + i * tile, c_stride);
        }
        for (int r = 0; r < rows; ++r) scale_row<vectors>(c + r * c_stride, scale);
    }

    template <int vectors, int R>
    void added(const float* a, std::int64_t a_stride, const float* b, std::int64_t depth, float* c,
               std::int64_t c_stride, const float* decay, auto& ahead) {
        for (int r = 0; r < rows; ++r) {
            if (decay[r] != 1) scale_row<vectors>(c + r * c_stride, decay[r]);
        }
        for (int i = 0; i + 2 <= vectors; i += 2) {
            add<true>(a, a_stride, b + i * tile, vectors * tile, depth, c + i * tile, c_stride,
                      ahead);
        }
        if constexpr (vectors % 2 == 1) {
            constexpr int i = vectors - 1;
            add<false>(a, a_stride, b + i * tile, vectors * tile, depth, c + i * tile, c_stride,
                       ahead);
        }
    }

  private:
    // Tiles 0 to 3 are sums: of the upper and lower rows with the first columns, then with the
    // second, if there are two. 4 and 5 hold rows of A, 6 and 7 columns of B. Strides in floats.
    template <bool two>
    void accumulate(const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride,
                    std::int64_t depth, auto& ahead) {
        const std::int64_t a_bytes = a_stride * sizeof(float), b_bytes = b_stride * sizeof(float);
        static_assert(tile == kAheadDepth);
        for (std::int64_t k = 0; k < depth; k += tile) {
            ahead.step();
            tiles_.template load<4>(a + k, a_bytes);
            tiles_.template load<5>(a + k + simd::kTileRows * a_stride, a_bytes);
            tiles_.template load<6>(b + k * b_stride, b_bytes);
            tiles_.template dot_pairs<0, 4, 6>();
            tiles_.template dot_pairs<1, 5, 6>();
            if constexpr (two) {
                tiles_.template load<7>(b + k * b_stride + tile, b_bytes);
                tiles_.template dot_pairs<2, 4, 7>();
                tiles_.template dot_pairs<3, 5, 7>();
            }
        }
    }

    template <bool two>
    void add(const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride,
             std::int64_t depth, float* c, std::int64_t c_stride, auto& ahead) {
        const std::int64_t bytes = c_stride * sizeof(float);
        tiles_.template load<0>(c, bytes);
        tiles_.template load<1>(c + simd::kTileRows * c_stride, bytes);
        if constexpr (two) {
            tiles_.template load<2>(c + tile, bytes);
            tiles_.template load<3>(c + simd::kTileRows * c_stride + tile, bytes);
        }
        accumulate<two>(a, a_stride, b, b_stride, depth, ahead);
        store<two>(c, c_stride);
    }

    template <bool two>
    void store(float* c, std::int64_t c_stride) const {
        const std::int64_t bytes = c_stride * sizeof(float);
        tiles_.template store<0>(c, bytes);
        tiles_.template store<1>(c + simd::kTileRows * c_stride, bytes);
        if constexpr (two) {
            tiles_.template store<2>(c + tile, bytes);
            tiles_.template store<3>(c + simd::kTileRows * c_stride + tile, bytes);
        }
    }

    template <int vectors>
    static void scale_row(float* row, float factor) {
        KVDB_UNROLL
        for (int i = 0; i < vectors; ++i) {
            Isa::store(row + i * tile, Isa::template load<f32>(row + i * tile) * factor);
        }
    }

    typename Isa::Tiles tiles_;
};

}  // namespace kvdb::kernels
