// Where the keys and values of one layer lie: blocks, as they were stored. Nothing is copied. Their
// addresses tell the format, which is the same of all (block_format.h).
#pragma once

#include <cstdint>

#include "block_format.h"
#include "geometry.h"

namespace kvdb::indexes {

struct Blocks {
    Geometry geometry;
    const std::uint64_t* table;  // block base addresses
    std::int64_t tokens;

    bool quantized() const { return tokens > 0 && format_of(table[0]) != BlockFormat::raw; }

    // Of blocks that are not quantized.
    const std::byte* key(int kv_head, std::int64_t token) const {
        const std::int64_t block = token / geometry.block_size;
        return reinterpret_cast<const std::byte*>(table[block]) +
               geometry.key_at(kv_head, token - block * geometry.block_size);
    }
    const std::byte* value(int kv_head, std::int64_t token) const {
        const std::int64_t block = token / geometry.block_size;
        return reinterpret_cast<const std::byte*>(table[block]) +
               geometry.value_at(kv_head, token - block * geometry.block_size);
    }
};

}  // namespace kvdb::indexes
