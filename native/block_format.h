// How the numbers of a block are stored: as they came, or quantized, where keys and values are as
// long and apart.
//
// A quantized block is [kv_heads] of: codes of keys, codes of values, the centre of the keys and of
// the values (bfloat16 [head_dim] each), a scale for each key and for each value (bfloat16
// [block_size] each). A number is centre + scale * (code - zero), in the space that a fixed
// rotation (simd/hadamard.h) leads to, where no channel stands out. Codes lie in the order in
// which they are multiplied, four to a 32-bit lane:
//
//   keys    [block_size / 16][head_dim / 4][16 tokens][4 channels]
//   values  [block_size / 4][head_dim][4 tokens]
//
// With four bits, two neighbours of the second dimension (keys) or of the first (values) share
// their bytes, the first in the low half.
#pragma once

#include "geometry.h"

namespace kvdb {

enum class Plane : int { key, value };
enum class BlockFormat : int { raw, int8, int8_int4, int4 };
inline constexpr int kQuantizedFormats = 3;
inline constexpr int kQuantizedGroup = 16;    // tokens; block_size is a multiple of it
inline constexpr int kQuantizedDimMax = 256;  // sums of more codes' products exceed 32 bits

inline constexpr std::uint64_t kFormatMask = 7;  // of a block's address, where its format is

constexpr BlockFormat format_of(std::uint64_t address) {
    return static_cast<BlockFormat>(address & kFormatMask);
}
constexpr int key_bits(BlockFormat format) {
    return format == BlockFormat::int4 ? 4 : 8;
}
constexpr int value_bits(BlockFormat format) {
    return format == BlockFormat::int8 ? 8 : 4;
}

// Where the parts of one KV head lie in a quantized block, in bytes.
struct QuantizedHead {
    std::size_t values, key_centre, value_centre, key_scales, value_scales, bytes;

    constexpr QuantizedHead(const Geometry& geometry, int key_bits, int value_bits)
        : values(codes(geometry, key_bits)),
          key_centre(values + codes(geometry, value_bits)),
          value_centre(key_centre + 2 * geometry.head_dim),
          key_scales(value_centre + 2 * geometry.head_dim),
          value_scales(key_scales + 2 * geometry.block_size),
          bytes((value_scales + 2 * geometry.block_size + 63) / 64 * 64) {}

  private:
    static constexpr std::size_t codes(const Geometry& geometry, int bits) {
        return std::size_t{1} * geometry.block_size * geometry.head_dim * bits / 8;
    }
};

constexpr std::size_t block_bytes(const Geometry& geometry, BlockFormat format) {
    if (format == BlockFormat::raw) return geometry.block_bytes();
    return geometry.kv_heads * QuantizedHead(geometry, key_bits(format), value_bits(format)).bytes;
}

}  // namespace kvdb
