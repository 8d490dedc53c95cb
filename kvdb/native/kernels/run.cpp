#include "run.h"

#include <algorithm>

namespace kvdb {
namespace {

std::int32_t view_of(const Placement& placement, std::int64_t block) {
    return block < placement.blocks ? placement.view[block] : -1;
}

// The bits of `count` tokens, at most 64, from `slot` of a block on.
std::uint64_t hidden_bits(const Placement& placement, std::int64_t block, int slot, int count) {
    if (!placement.hidden || block >= placement.blocks) return 0;
    const std::uint64_t* word = placement.hidden + block * placement.words + slot / 64;
    const int shift = slot % 64;
    std::uint64_t bits = word[0] >> shift;
    if (shift + count > 64) bits |= word[1] << (64 - shift);
    return count < 64 ? bits & ((std::uint64_t{1} << count) - 1) : bits;
}

}  // namespace

bool TileHead::all_hidden() const {
    const auto first = [](int tokens) {
        return tokens < 64 ? (std::uint64_t{1} << std::max(tokens, 0)) - 1 : ~std::uint64_t{0};
    };
    for (int w = 0; w < words; ++w) {
        if (hidden[w] != first(count - 64 * w)) return false;
    }
    return true;
}

// A whole group in place, or rows of one.
void RunCursor::Addresses::put(int filled, int take, const std::byte* row,
                               std::size_t row_bytes) const {
    if (take == kGroup) {
        start[filled / kGroup] = row;
        return;
    }
    start[filled / kGroup] = nullptr;
    for (int i = 0; i < take; ++i) rows[filled + i] = row + row_bytes * i;
}

void RunCursor::next(TileHead& tile, const Addresses& keys, const Addresses& values, int limit) {
    const Placement* placement = run_.placement;
    tile.begin = token_;
    if (placement) {
        tile.view = -1;
        std::fill(tile.hidden, tile.hidden + TileHead::words, 0);
    }
    limit = static_cast<int>(std::clamp<std::int64_t>(end_ - token_, 0, limit));
    int filled = 0;
    while (filled < limit && block_ < run_.blocks) {
        const int left = run_.counts[block_] - slot_;
        const auto* block = reinterpret_cast<const std::byte*>(run_.table[block_]);
        int take = std::min({left, kGroup - filled % kGroup, limit - filled});
        if (placement && take > 0) {
            const std::int32_t view = view_of(*placement, block_);
            if (filled == 0) tile.view = view;
            if (view != tile.view) break;
            tile.hidden[filled / 64] |= hidden_bits(*placement, block_, slot_, take) << filled % 64;
        }
        if (take > 0) {
            keys.put(filled, take, block + key_bytes_ * slot_, key_bytes_);
            values.put(filled, take, block + values_at_ + value_bytes_ * slot_, value_bytes_);
        }
        filled += take;
        slot_ += take;
        if (slot_ == run_.counts[block_]) {
            ++block_;
            slot_ = 0;
        }
    }
    token_ += filled;
    tile.count = filled;
}

}  // namespace kvdb
