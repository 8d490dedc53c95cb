// The shape of a block: element type, KV heads, head dimension, tokens per block.
#pragma once

#include <cstddef>
#include <cstdint>

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

inline constexpr int kHeadDimMax = 256;
inline constexpr int kHeadDimStep = 8;  // head_dim is a multiple of this
inline constexpr int kBlockSizeMax = 1024;

// A block is one allocation of [k, v][kv_heads][block_size][head_dim], contiguous.
struct Geometry {
    Dtype dtype;
    int kv_heads;
    int head_dim;
    int block_size;

    bool operator==(const Geometry&) const = default;
    std::size_t element_bytes() const { return dtype == Dtype::float32 ? 4 : 2; }
    std::size_t row_bytes() const { return element_bytes() * head_dim; }
    std::size_t head_bytes() const { return row_bytes() * block_size; }
    std::size_t plane_bytes() const { return head_bytes() * kv_heads; }
    std::size_t block_bytes() const { return 2 * plane_bytes(); }
};

// Throws std::invalid_argument, which says what was given and what was expected.
KVDB_BASE Geometry checked_geometry(Dtype dtype, int kv_heads, int head_dim, int block_size);

}  // namespace kvdb
