// The matrix product of prefill, in registers of vectors.
#pragma once

#include "kernels.h"
#include "operand.h"

namespace kvdb::kernels {

inline constexpr int kAheadDepth = 16;  // between two steps of what is read ahead

// C[rows][vectors * width] = A[rows][depth] * B[depth][vectors * width], where A's rows
// lie a_stride floats apart and B is one panel. In the product before the softmax, C is scaled; in
// the product after it, the result is added to C * decay of its row. Both take some of the rows.
// ahead: see ReadAhead, whose steps they spread over their work.
template <class Isa, class T>
struct Multiply {
    using f32 = typename Isa::f32;
    using Op = Operand<Isa, T>;
    static constexpr int rows = Isa::tile_rows;
    static constexpr int rows_few = 4;     // of a product for which fewer rows are left
    static constexpr int block_rows = 48;  // their scores stay in the L2 cache beside a tile
    static constexpr int depth_step = 1;   // depth is a multiple of it

    template <int vectors, int R>
    static void scaled(const float* a, std::int64_t a_stride, const float* b, std::int64_t depth,
                       float* c, std::int64_t c_stride, float scale, auto& ahead) {
        f32 sums[R][vectors] = {};
        accumulate<vectors, R>(a, a_stride, b, depth, sums, ahead);
        KVDB_UNROLL
        for (int r = 0; r < R; ++r) {
            KVDB_UNROLL
            for (int i = 0; i < vectors; ++i) {
                Isa::store(c + r * c_stride + i * Isa::width, sums[r][i] * scale);
            }
        }
    }

    template <int vectors, int R>
    static void added(const float* a, std::int64_t a_stride, const float* b, std::int64_t depth,
                      float* c, std::int64_t c_stride, const float* decay, auto& ahead) {
        f32 sums[R][vectors];
        KVDB_UNROLL
        for (int r = 0; r < R; ++r) {
            KVDB_UNROLL
            for (int i = 0; i < vectors; ++i) {
                sums[r][i] = Isa::template load<f32>(c + r * c_stride + i * Isa::width) * decay[r];
            }
        }
        accumulate<vectors, R>(a, a_stride, b, depth, sums, ahead);
        KVDB_UNROLL
        for (int r = 0; r < R; ++r) {
            KVDB_UNROLL
            for (int i = 0; i < vectors; ++i) {
                Isa::store(c + r * c_stride + i * Isa::width, sums[r][i]);
            }
        }
    }

  private:
    template <int vectors, int R>
    KVDB_INLINE static void accumulate(const float* a, std::int64_t a_stride, const float* b,
                                       std::int64_t depth, f32 (&sums)[R][vectors], auto& ahead) {
        for (std::int64_t k = 0; k < depth; ++k, ++a, b += vectors * Isa::width) {
            if (k % kAheadDepth == 0) ahead.step();
            f32 column[vectors];
            KVDB_UNROLL
            for (int i = 0; i < vectors; ++i) {
                column[i] = Isa::template load<f32>(b + i * Isa::width);
            }
            KVDB_UNROLL
            for (int r = 0; r < R; ++r) {
                const f32 x = Isa::splat(a[r * a_stride]);
                KVDB_UNROLL
                for (int i = 0; i < vectors; ++i) {
                    sums[r][i] = Op::multiply_add(x, column[i], sums[r][i]);
                }
            }
        }
    }
};

}  // namespace kvdb::kernels
