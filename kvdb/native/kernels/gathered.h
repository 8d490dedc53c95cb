// The keys and values of a tile for one KV head, where each group of tokens is contiguous: keys
// head_dim elements apart, and values value_stride().
#pragma once

#include "kernels.h"

namespace kvdb::kernels {

template <class Isa, class T, int groups>
struct Gathered {
    const T* keys[groups];
    const T* values[groups];

    // The number of scratch elements that gathering needs.
    static constexpr std::size_t scratch_elements(const Geometry& geometry) {
        return std::size_t{1} * groups * group_elements(geometry);
    }

    // Groups that are not contiguous are copied to `scratch`; rows missing in the last one are 0.
    Gathered(const Geometry& geometry, const Tile<groups>& tile, int kv_head, T* scratch) {
        const std::size_t key_head = geometry.key_at(kv_head);
        const std::size_t value_head = geometry.value_at(kv_head) - geometry.values_at();
        for (int g = 0; g < tile.group_count(); ++g) {
            if (const std::byte* start = tile.start[g]) {
                keys[g] = reinterpret_cast<const T*>(start + key_head);
                values[g] = reinterpret_cast<const T*>(tile.value_start[g] + value_head);
                continue;
            }
            const int tokens = tile.tokens_in(g);
            keys[g] =
                copy(tile.rows + g * kGroup, tokens, key_head, geometry.key_row_bytes(), scratch);
            values[g] = geometry.values_in_keys
                            ? keys[g]
                            : copy(tile.value_rows + g * kGroup, tokens, value_head,
                                   geometry.value_row_bytes(),
                                   scratch + std::size_t{kGroup} * geometry.head_dim);
            scratch += group_elements(geometry);
        }
        for (int g = tile.group_count(); g < groups; ++g) {  // to be prefetched, not to be read
            keys[g] = keys[0];
            values[g] = values[0];
        }
    }

  private:
    static constexpr std::size_t group_elements(const Geometry& geometry) {
        const int values = geometry.values_in_keys ? 0 : geometry.value_dim;
        return std::size_t{kGroup} * (geometry.head_dim + values);
    }

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
