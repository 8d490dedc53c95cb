// A run: tokens spread over a sequence of blocks, of which each holds a valid prefix.
#pragma once

#include <cstdint>

#include "geometry.h"

namespace kvdb {

struct Run {
    const std::uint64_t* table;  // block base addresses
    const std::int32_t* counts;  // valid tokens of each block, [0, block_size]
    std::int64_t blocks;
};

// What kernels see instead of blocks: groups of 16 consecutive tokens. Where 16 rows lie one behind
// the other, `start` is the first one's address, and they are used in place. Where they do not (at
// the ragged end of a block, with odd block sizes) it is null, and the rows' addresses tell what to
// copy together. Addresses are those of KV head 0's keys.
inline constexpr int kGroup = 16;

template <int groups>
struct Tile {
    static constexpr int tokens_max = groups * kGroup;
    std::int64_t begin = 0;  // run position of the first token
    int count = 0;           // tokens; all groups are full but the last
    const std::byte* start[groups];
    const std::byte* rows[tokens_max];

    int group_count() const { return (count + kGroup - 1) / kGroup; }
    int tokens_in(int group) const {
        return count - group * kGroup < kGroup ? count - group * kGroup : kGroup;
    }
};

class RunCursor {
  public:
    // From the first token of a block, at run position `token`, up to position `end`.
    RunCursor(const Geometry& geometry, const Run& run, std::int64_t block, std::int64_t token,
              std::int64_t end)
        : run_(run), row_bytes_(geometry.row_bytes()), block_(block), token_(token), end_(end) {}

    // False behind the last token.
    template <int groups>
    bool next(Tile<groups>& tile) {
        tile.begin = token_;
        tile.count = next(tile.start, tile.rows, groups * kGroup);
        return tile.count > 0;
    }

  private:
    int next(const std::byte** start, const std::byte** rows, int limit);

    const Run& run_;
    const std::size_t row_bytes_;
    std::int64_t block_;
    std::int64_t token_;
    const std::int64_t end_;
    int slot_ = 0;
};

}  // namespace kvdb
