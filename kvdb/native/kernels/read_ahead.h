// The next tile's keys and values, asked for line by line while the present one is computed with.
//
// Without it, packing a tile waits for main memory: 2 % of a prefill over more tokens than the
// caches hold.
#pragma once

#include "kernels.h"
#include "simd/generic.h"

namespace kvdb::kernels {

template <class Isa, int groups>
class ReadAhead {
  public:
    // Of one KV head of a tile; `steps` will follow.
    void begin(const Geometry& geometry, const Tile<groups>& tile, int kv_head,
               std::int64_t steps) {
        const std::size_t key_head = geometry.key_at(kv_head);
        const std::size_t value_head = geometry.value_at(kv_head) - geometry.values_at();
        key_lines_ = static_cast<int>(kGroup * geometry.key_row_bytes() / kLine);
        group_lines_ = key_lines_;
        if (!geometry.values_in_keys) {
            group_lines_ += static_cast<int>(kGroup * geometry.value_row_bytes() / kLine);
        }
        group_ = line_ = groups_ = 0;
        for (int g = 0; g < tile.group_count(); ++g) {
            if (!tile.start[g]) continue;  // gathered from rows: a block's ragged end
            keys_[groups_] = tile.start[g] + key_head;
            values_[groups_++] = tile.value_start[g] + value_head;
        }
        step_lines_ = static_cast<int>(groups_ * group_lines_ / steps) + 1;
    }

    KVDB_INLINE void step() {
        for (int n = 0; n < step_lines_ && group_ < groups_; ++n) {
            const std::byte* at = line_ < key_lines_
                                      ? keys_[group_] + line_ * kLine
                                      : values_[group_] + (line_ - key_lines_) * kLine;
            __builtin_prefetch(at, 0, 2);
            if (++line_ == group_lines_) {
                ++group_;
                line_ = 0;
            }
        }
    }

  private:
    static constexpr int kLine = 64;

    const std::byte* keys_[groups];
    const std::byte* values_[groups];
    int key_lines_ = 0, group_lines_ = 0;  // of a group: of its keys, and of all
    int groups_ = 0;
    int group_ = 0, line_ = 0;  // what comes next
    int step_lines_ = 0;
};

}  // namespace kvdb::kernels
