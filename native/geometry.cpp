#include "geometry.h"

#include <stdexcept>
#include <string>

namespace kvdb {

Geometry checked_geometry(Dtype dtype, int kv_heads, int head_dim, int block_size) {
    const auto fail = [](const std::string& message) { throw std::invalid_argument(message); };
    if (kv_heads < 1) fail("kv_heads is " + std::to_string(kv_heads) + "; expected at least 1");
    if (head_dim < kHeadDimStep || head_dim > kHeadDimMax || head_dim % kHeadDimStep != 0) {
        fail("head_dim is " + std::to_string(head_dim) + "; expected a multiple of " +
             std::to_string(kHeadDimStep) + " up to " + std::to_string(kHeadDimMax));
    }
    if (block_size < 1 || block_size > kBlockSizeMax) {
        fail("block_size is " + std::to_string(block_size) + "; expected 1 to " +
             std::to_string(kBlockSizeMax));
    }
    return {dtype, kv_heads, head_dim, block_size};
}

}  // namespace kvdb
