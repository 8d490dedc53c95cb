// A tile of quantized tokens of one KV head, and the rows that attend to it.
#pragma once

#include "kernels.h"
#include "simd/generic.h"

namespace kvdb::kernels {

inline constexpr int kQuantizedTile = 64;  // tokens

struct QuantizedTile {
    const std::byte* head;  // of the block
    std::ptrdiff_t ahead;   // to what is read next; 0: not to be prefetched
    std::int64_t begin;     // run position of the first token
    int slot, count;
    std::uint64_t hidden;  // a bit of each token that nobody sees

    int groups() const { return (count + kQuantizedGroup - 1) / kQuantizedGroup; }
};

// R rows and their running softmax.
struct QuantizedRows {
    const float* query;  // [R][query_stride]: the rotated row, its bytes, step, correction
    std::int64_t query_stride;
    float* values;  // [R][stride]
    std::int64_t stride;
    float *max, *sum;  // [R]
    std::int64_t first_row;
};

}  // namespace kvdb::kernels
