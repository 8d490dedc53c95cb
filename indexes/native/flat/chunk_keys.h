// The keys of a chunk in the form in which they are coded, for the code that writes codes and the
// code that checks them.
#pragma once

#include "../dot.h"
#include "../each_chunk.h"
#include "../rotate.h"
#include "flat.h"

namespace kvdb::indexes::flat {

inline constexpr int kPiece = 64;  // keys widened at a time

inline void widen(const Blocks& blocks, int kv_head, std::int64_t begin, std::int64_t count,
                  float* out) {
    const auto kernel = score_kernels().widen_keys[static_cast<int>(blocks.geometry.dtype)];
    kernel({blocks, kv_head, begin, count, out});
}

// body(slot, key, raw_norm) for each key of tokens [begin, end), which lie in one chunk: the key in
// float32, less the chunk's centre and rotated, and its length before that.
template <class Body>
void each_key(const Blocks& blocks, const FlatCodes& codes, int kv_head, std::int64_t begin,
              std::int64_t end, Body&& body) {
    const int d = codes.head_dim;
    const float* centre = codes.centre(codes.at(begin / kChunk, kv_head));
    float keys[kPiece * kHeadDimMax];
    for (std::int64_t t = begin; t < end; t += kPiece) {
        const std::int64_t count = std::min<std::int64_t>(kPiece, end - t);
        widen(blocks, kv_head, t, count, keys);
        for (std::int64_t j = 0; j < count; ++j) {
            float* key = keys + j * d;
            const float raw_norm = static_cast<float>(length(key, d));
            for (int i = 0; i < d; ++i) key[i] -= centre[i];
            rotate(key, d);
            body(static_cast<int>((t + j) % kChunk), key, raw_norm);
        }
    }
}

}  // namespace kvdb::indexes::flat
