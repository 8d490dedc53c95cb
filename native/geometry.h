// The shape of a block: element type, KV heads, numbers of a key and of a value, tokens per block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "export.h"

namespace kvdb {

enum class Dtype : int { float32, float16, bfloat16 };
inline constexpr int kDtypes = 3;

// The 16-bit element types differ by type only; arithmetic is done in float lanes.
struct Float16 {
    std::uint16_t bits;
};
struct BFloat16 {
    std::uint16_t bits;
};

inline constexpr int kHeadDimMax = 640;  // of a key, and of a value
inline constexpr int kHeadDimStep = 8;   // head_dim and value_dim are multiples of this
inline constexpr int kBlockSizeMax = 1024;

// A block is one allocation of keys, [kv_heads][block_size][head_dim], and behind them values,
// [kv_heads][block_size][value_dim]. With values_in_keys there are keys alone, and a value is the
// first value_dim numbers of its key. value_dim 0: tokens have no values, and are not attended.
struct Geometry {
    Dtype dtype;
    int kv_heads;
    int head_dim;
    int block_size;
    int value_dim;
    bool values_in_keys;

    bool operator==(const Geometry&) const = default;

    // Whether keys and values are as long, in planes of their own.
    constexpr bool symmetric() const { return value_dim == head_dim && !values_in_keys; }
    constexpr bool own_values() const { return value_dim > 0 && !values_in_keys; }

    constexpr std::size_t element_bytes() const { return dtype == Dtype::float32 ? 4 : 2; }
    constexpr std::size_t key_row_bytes() const { return element_bytes() * head_dim; }
    constexpr std::size_t value_row_bytes() const { return element_bytes() * value_dim; }
    // From a token's value to the next one's: elements, and bytes.
    constexpr int value_stride() const { return values_in_keys ? head_dim : value_dim; }
    constexpr std::size_t value_stride_bytes() const { return element_bytes() * value_stride(); }

    // Where the keys, and the values, of a KV head lie in a block, from one of its tokens on.
    constexpr std::size_t key_at(int kv_head, std::int64_t slot = 0) const {
        return (std::size_t{1} * kv_head * block_size + slot) * key_row_bytes();
    }
    constexpr std::size_t value_at(int kv_head, std::int64_t slot = 0) const {
        return values_at() + (std::size_t{1} * kv_head * block_size + slot) * value_stride_bytes();
    }
    constexpr std::size_t values_at() const {
        return values_in_keys ? 0 : key_row_bytes() * block_size * kv_heads;
    }

    // What is stored of a token, over all KV heads.
    constexpr std::size_t token_bytes() const {
        return kv_heads * (key_row_bytes() + (values_in_keys ? 0 : value_row_bytes()));
    }
    constexpr std::size_t block_bytes() const { return token_bytes() * block_size; }
};

// Throws std::invalid_argument, which says what was given and what was expected.
// value_dim: head_dim where it is not given.
KVDB_BASE Geometry checked_geometry(Dtype dtype, int kv_heads, int head_dim, int block_size,
                                    std::optional<int> value_dim = {}, bool values_in_keys = false);
// Fails too where tokens have no values.
KVDB_BASE void check_attendable(const Geometry& geometry);

}  // namespace kvdb
