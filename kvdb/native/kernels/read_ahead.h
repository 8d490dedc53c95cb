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
        const std::size_t head = kv_head * geometry.head_bytes();
        group_lines_ = static_cast<int>(kGroup * geometry.row_bytes() / kLine);
        line_ = lines_ = 0;
        for (int g = 0; g < tile.group_count(); ++g) {
            if (!tile.start[g]) continue;  // gathered from rows: a block's ragged end
            starts_[lines_++] = tile.start[g] + head;
            starts_[lines_++] = tile.start[g] + head + geometry.plane_bytes();
        }
        lines_ *= group_lines_;
        step_lines_ = static_cast<int>(lines_ / steps) + 1;
    }

    KVDB_INLINE void step() {
        for (int n = 0; n < step_lines_ && line_ < lines_; ++n, ++line_) {
            __builtin_prefetch(starts_[line_ / group_lines_] + line_ % group_lines_ * kLine, 0, 2);
        }
    }

  private:
    static constexpr int kLine = 64;

    const std::byte* starts_[2 * groups];
    int group_lines_ = 1;
    int lines_ = 0, line_ = 0;  // all, and those that were asked for
    int step_lines_ = 0;
};

}  // namespace kvdb::kernels
