#include "run.h"

#include <algorithm>

namespace kvdb {

int RunCursor::next(const std::byte** start, const std::byte** rows, int limit) {
    limit = static_cast<int>(std::clamp<std::int64_t>(end_ - token_, 0, limit));
    int filled = 0;
    while (filled < limit && block_ < run_.blocks) {
        const int left = run_.counts[block_] - slot_;
        const auto* row =
            reinterpret_cast<const std::byte*>(run_.table[block_]) + row_bytes_ * slot_;
        int take = std::min({left, kGroup - filled % kGroup, limit - filled});
        if (take == kGroup) {
            start[filled / kGroup] = row;
        } else if (take > 0) {
            start[filled / kGroup] = nullptr;
            for (int i = 0; i < take; ++i) rows[filled + i] = row + row_bytes_ * i;
        }
        filled += take;
        slot_ += take;
        if (slot_ == run_.counts[block_]) {
            ++block_;
            slot_ = 0;
        }
    }
    token_ += filled;
    return filled;
}

}  // namespace kvdb
