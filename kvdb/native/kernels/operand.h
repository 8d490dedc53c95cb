// How elements of type T are multiplied on an instruction set: as float lanes or, if it has an
// instruction for that, as 32-bit lanes that each hold a pair of bfloat16.
#pragma once

#include "kernels.h"
#include "simd/generic.h"

namespace kvdb::kernels {

template <class Isa, class T>
struct Operand {
    using f32 = typename Isa::f32;
    static constexpr int per_lane = 1;  // elements of a sum that one lane holds

    KVDB_INLINE static f32 load(const T* row) { return Isa::widen(row); }
    // The last `lanes` (< width) of a row. As head_dim is a multiple of 8 this is half a vector.
    KVDB_INLINE static f32 load_tail(const T* row, [[maybe_unused]] int lanes) {
        if constexpr (Isa::width > kHeadDimStep) {
            return Isa::widen_half(row);
        } else {
            return load(row);  // never: width divides head_dim
        }
    }
    KVDB_INLINE static f32 multiply_add(f32 a, f32 b, f32 c) { return Isa::fma(a, b, c); }

    // One load of values takes `value_dims` dimensions of per_lane tokens, as `value_vectors`.
    static constexpr int value_vectors = 1;
    static constexpr int value_dims = Isa::width;
    KVDB_INLINE static void load_values(const T* row, int /*row_stride*/, f32* v) {
        v[0] = load(row);
    }
    KVDB_INLINE static void load_values_tail(const T* row, int /*row_stride*/, int dims, f32* v) {
        v[0] = load_tail(row, dims);
    }
    // Brings sums of products with loaded values into the order of dimensions.
    KVDB_INLINE static void order_sums(float* /*sums*/, int /*head_dim*/) {}
    // Writes softmax weights as the other factor of the product, at `index`.
    KVDB_INLINE static void store_weights(float* lanes, int index, f32 weights) {
        Isa::store(lanes + index, weights);
    }
};

template <class Isa>
    requires Isa::has_bf16_dot
struct Operand<Isa, BFloat16> {
    using f32 = typename Isa::f32;
    static constexpr int per_lane = 2;

    KVDB_INLINE static f32 load(const BFloat16* row) { return Isa::template load<f32>(row); }
    KVDB_INLINE static f32 load_tail(const BFloat16* row, int lanes) {
        return Isa::load_pairs(row, lanes);
    }
    KVDB_INLINE static f32 multiply_add(f32 a, f32 b, f32 c) { return Isa::dot_pairs(a, b, c); }

    // Weights in bfloat16 cause an error of about 1e-3 of the output's norm, as much as rounding
    // the output does.
    static constexpr int value_vectors = 2;
    static constexpr int value_dims = 2 * Isa::width;
    KVDB_INLINE static void load_values(const BFloat16* row, int row_stride, f32* v) {
        Isa::zip(load(row), load(row + row_stride), v[0], v[1]);
    }
    KVDB_INLINE static void load_values_tail(const BFloat16* row, int row_stride, int dims,
                                             f32* v) {
        Isa::zip(load_tail(row, dims / 2), load_tail(row + row_stride, dims / 2), v[0], v[1]);
    }
    KVDB_INLINE static void order_sums(float* sums, int head_dim) {
        for (int i = 0; i < head_dim; i += value_dims) {
            f32 low = Isa::template load<f32>(sums + i);
            f32 high = Isa::template load<f32>(sums + i + Isa::width);
            Isa::unzip(low, high);
            Isa::store(sums + i, low);
            Isa::store(sums + i + Isa::width, high);
        }
    }
    KVDB_INLINE static void store_weights(float* lanes, int index, f32 weights) {
        Isa::narrow(reinterpret_cast<BFloat16*>(lanes) + index, weights);
    }
};

// Writes one row of head_dim elements as operand lanes.
template <class Isa, class T>
KVDB_INLINE void load_row(float* lanes, const T* row, int head_dim) {
    using Op = Operand<Isa, T>;
    const int count = head_dim / Op::per_lane;
    const int whole = count / Isa::width * Isa::width;
    for (int i = 0; i < whole; i += Isa::width) {
        Isa::store(lanes + i, Op::load(row + i * Op::per_lane));
    }
    if (whole < count) {
        Isa::store(lanes + whole, Op::load_tail(row + whole * Op::per_lane, count - whole));
    }
}

// Where row r of the item's KV head lies in the query or the output.
template <class T, class Item>
KVDB_INLINE T* row_of(const Rows& rows, const Item& item, int head_of_item, std::int64_t r) {
    const std::int64_t token = r / item.group;
    const std::int64_t kv_head = item.kv_head + head_of_item;
    const std::int64_t head = kv_head * item.group + r % item.group;
    return static_cast<T*>(rows.data) + head * rows.head_stride + token * rows.token_stride;
}

// The number of tokens of the run that a row sees.
KVDB_INLINE std::int64_t visible(const auto& item, std::int64_t row) {
    const std::int64_t query = row / item.group;
    return item.ends ? item.ends[query] : item.visible_first + query * item.visible_step;
}

// The first of them.
KVDB_INLINE std::int64_t first_visible(const auto& item, std::int64_t row) {
    return item.begins ? item.begins[row / item.group] : 0;
}

}  // namespace kvdb::kernels
