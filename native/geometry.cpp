#include "geometry.h"

#include <stdexcept>
#include <string>

namespace kvdb {

namespace {

void fail(const std::string& message) {
    throw std::invalid_argument(message);
}

}  // namespace

Geometry checked_geometry(Dtype dtype, int kv_heads, int head_dim, int block_size,
                          std::optional<int> value_dim, bool values_in_keys) {
    if (kv_heads < 1) fail("kv_heads is " + std::to_string(kv_heads) + "; expected at least 1");
    if (head_dim < kHeadDimStep || head_dim > kHeadDimMax || head_dim % kHeadDimStep != 0) {
        fail("head_dim is " + std::to_string(head_dim) + "; expected a multiple of " +
             std::to_string(kHeadDimStep) + " up to " + std::to_string(kHeadDimMax));
    }
    if (block_size < 1 || block_size > kBlockSizeMax) {
        fail("block_size is " + std::to_string(block_size) + "; expected 1 to " +
             std::to_string(kBlockSizeMax));
    }
    const int values = value_dim.value_or(head_dim);
    if (values < 0 || values > kHeadDimMax || values % kHeadDimStep != 0) {
        fail("value_dim is " + std::to_string(values) + "; expected a multiple of " +
             std::to_string(kHeadDimStep) + " from 0 to " + std::to_string(kHeadDimMax));
    }
    if (values_in_keys && (values == 0 || values > head_dim)) {
        fail("value_dim is " + std::to_string(values) + " of a key's " + std::to_string(head_dim) +
             " numbers; values in keys are the first of them, 1 or more");
    }
    return {dtype, kv_heads, head_dim, block_size, values, values_in_keys};
}

void check_attendable(const Geometry& geometry) {
    if (geometry.value_dim == 0) {
        fail("value_dim is 0; tokens without values can be searched, but not attended");
    }
}

}  // namespace kvdb
