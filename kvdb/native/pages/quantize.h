// Blocks become quantized blocks, and their tokens rows of arrays again.
#pragma once

#include "transfer.h"

namespace kvdb {

// Squared lengths, of keys and of values: of what rounding changed, and of what was rounded.
struct QuantizationError {
    double error[2], norm[2];
};

// Throws std::invalid_argument if blocks of this geometry cannot be of the format.
void check_format(const Geometry& geometry, BlockFormat format);

// Writes the first n tokens of a run into quantized blocks, one for each block of the run.
QuantizationError quantize(const Geometry& geometry, BlockFormat format, const Table& from,
                           std::int64_t n, const Table& to);

// Reads n tokens from [start, start + n) of quantized blocks, rounded to the geometry's type.
void dequantize(const Geometry& geometry, BlockFormat format, const Table& from, std::int64_t start,
                std::int64_t n, const Rows& keys, const Rows& values);

// Copies a quantized block with zeros in place of the codes and scales behind its first n tokens.
void cut(const Geometry& geometry, BlockFormat format, const std::byte* from, int n, std::byte* to);

// The bytes of the keys and values of a run, each block in the format that its address tells.
std::int64_t payload_bytes(const Geometry& geometry, const Run& run);

// The bytes of one token's values, of all heads, in blocks of the format; its keys take the others.
std::int64_t value_bytes(const Geometry& geometry, BlockFormat format);

}  // namespace kvdb
