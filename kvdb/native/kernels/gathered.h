// The keys and values of a tile for one KV head, where each group of tokens is contiguous.
#pragma once

#include "kernels.h"

namespace kvdb::kernels {

template <class Isa, class T, int groups>
struct Gathered {
    const T* keys[groups];
    const T* values[groups];

    // The number of scratch elements that gathering needs.
    static constexpr std::size_t scratch_elements(int head_dim) {
        return std::size_t{2} * groups * kGroup * head_dim;
    }

    // Groups that are not contiguous are copied to `scratch`; rows missing in the last one are 0.
    Gathered(const Geometry& geometry, const Tile<groups>& tile, int kv_head, T* scratch) {
        const std::size_t head = kv_head * geometry.head_bytes();
        const std::size_t plane = geometry.plane_bytes();
        const std::size_t group_elements = std::size_t{kGroup} * geometry.head_dim;
        for (int g = 0; g < tile.group_count(); ++g) {
            if (const std::byte* start = tile.start[g]) {
                keys[g] = reinterpret_cast<const T*>(start + head);
                values[g] = reinterpret_cast<const T*>(start + head + plane);
                continue;
            }
            const std::byte* const* rows = tile.rows + g * kGroup;
            const int tokens = tile.tokens_in(g);
            const std::size_t row_bytes = geometry.row_bytes();
            keys[g] = copy(rows, tokens, head, row_bytes, scratch);
            values[g] = copy(rows, tokens, head + plane, row_bytes, scratch + group_elements);
            scratch += 2 * group_elements;
        }
        for (int g = tile.group_count(); g < groups; ++g) {  // to be prefetched, not to be read
            keys[g] = keys[0];
            values[g] = values[0];
        }
    }

  private:
    static const T* copy(const std::byte* const* rows, int tokens, std::size_t offset,
                         std::size_t row_bytes, T* to) {
        auto* bytes = reinterpret_cast<std::byte*>(to);
        for (int t = 0; t < tokens; ++t, bytes += row_bytes) {
            __builtin_memcpy(bytes, rows[t] + offset, row_bytes);
        }
        __builtin_memset(bytes, 0, (kGroup - tokens) * row_bytes);
        return to;
    }
};

}  // namespace kvdb::kernels
