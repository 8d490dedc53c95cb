// A run: tokens in a sequence of blocks, where the first `counts[i]` tokens of block i are valid.
#pragma once

#include <cstdint>

#include "geometry.h"

namespace kvdb {

// How the first blocks of a run were moved after they were computed. Each belongs to a view, which
// has the angles of its shift. The keys stay as they are; the query is rotated back by the same
// angles. Blocks behind these were not moved.
struct Placement {
    const std::int32_t* view;  // [blocks]; -1 where a block was not moved
    std::int64_t blocks;
    const float *cos, *sin;  // [views][pairs]
    int pairs;               // the first 2 * pairs dimensions rotate
    bool interleaved;        // pairs are 2i and 2i + 1, else i and i + pairs
    const std::uint64_t*
        hidden;  // optional, [blocks][words]: a bit for each token, set if nobody sees it
    int words;
};

struct Run {
    const std::uint64_t* table;  // block base addresses
    const std::int32_t* counts;  // valid tokens of each block, [0, block_size]
    std::int64_t blocks;
    const Placement* placement = nullptr;
};

// Kernels see groups of 16 consecutive tokens instead of blocks. If the 16 rows are contiguous,
// `start` is the address of the first, and they are used in place. If they are not (at the ragged
// end of a block, or with odd block sizes), it is null, and the rows are copied together from their
// own addresses. Addresses are those of KV head 0's keys, and of its values.
inline constexpr int kGroup = 16;

//
// All tokens of a tile belong to one view, and at least one of them is visible.
struct TileHead {
    static constexpr int words = 4;
    std::int64_t begin = 0;  // run position of the first token
    int count = 0;           // tokens; all groups are full but the last
    std::int32_t view = -1;
    std::uint64_t hidden[words] = {};  // a bit of each token that nobody sees

    bool any_hidden() const { return (hidden[0] | hidden[1] | hidden[2] | hidden[3]) != 0; }
    bool all_hidden() const;
};

template <int groups>
struct Tile : TileHead {
    static constexpr int tokens_max = groups * kGroup;
    static_assert(tokens_max <= 64 * words);
    const std::byte* start[groups];
    const std::byte* rows[tokens_max];
    const std::byte* value_start[groups];  // where `start` is not null
    const std::byte* value_rows[tokens_max];

    int group_count() const { return (count + kGroup - 1) / kGroup; }
    int tokens_in(int group) const {
        return count - group * kGroup < kGroup ? count - group * kGroup : kGroup;
    }
};

class RunCursor {
  public:
    // Starts at the first token of a block, at run position `token`, and ends at position `end`.
    RunCursor(const Geometry& geometry, const Run& run, std::int64_t block, std::int64_t token,
              std::int64_t end)
        : run_(run),
          key_bytes_(geometry.key_row_bytes()),
          value_bytes_(geometry.value_stride_bytes()),
          values_at_(geometry.values_at()),
          block_(block),
          token_(token),
          end_(end) {}

    // Returns false behind the last token.
    template <int groups>
    bool next(Tile<groups>& tile) {
        do {
            next(tile, {tile.start, tile.rows}, {tile.value_start, tile.value_rows},
                 groups * kGroup);
        } while (run_.placement && tile.count > 0 && tile.all_hidden());
        return tile.count > 0;
    }

  private:
    // The addresses of a tile's keys, or values.
    struct Addresses {
        const std::byte** start;
        const std::byte** rows;

        void put(int filled, int take, const std::byte* row, std::size_t row_bytes) const;
    };
    void next(TileHead& tile, const Addresses& keys, const Addresses& values, int limit);

    const Run& run_;
    const std::size_t key_bytes_, value_bytes_, values_at_;
    std::int64_t block_;
    std::int64_t token_;
    const std::int64_t end_;
    int slot_ = 0;
};

}  // namespace kvdb
