// One search's queries over one index: its rows in tiles, and the tokens they see.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "flat.h"

namespace kvdb::indexes::flat {

// Up to kTile rows of one KV head.
struct Tile {
    int head;
    int rows;
    std::int64_t number;     // among those of its head
    std::int64_t first_row;  // among all rows
    const FlatTile* coded;

    // Rows behind the last one repeat it.
    std::int64_t row(int r) const { return first_row + std::min(r, rows - 1); }
};

// body(key) for each bit of a chunk.
template <class Body>
void each_bit(const std::uint64_t* bits, Body&& body) {
    for (int w = 0; w < kChunkWords; ++w) {
        for (std::uint64_t rest = bits[w]; rest; rest &= rest - 1) {
            body(64 * w + __builtin_ctzll(rest));
        }
    }
}

struct Batch {
    Batch(const Blocks& blocks, const FlatCodes& codes, const QueryRows& queries);

    const Blocks& blocks;
    const FlatCodes& codes;
    const QueryRows& queries;
    const std::int64_t heads, rows, tiles;     // rows and tiles of each head
    std::int64_t begin = INT64_MAX, end = 0;   // tokens that some query sees
    std::int64_t first_chunk = 0, chunks = 0;  // where they lie
    std::vector<std::int64_t> visible;         // [n] tokens that a query sees
    std::vector<int> active;                   // heads whose rows are to be answered

    // Rounds the queries of a tile; comes before `tile`.
    void prepare(int head, std::int64_t number);

    Tile tile(int head, std::int64_t number) const {
        const std::int64_t first = number * kTile;
        return {head, static_cast<int>(std::min<std::int64_t>(kTile, rows - first)), number,
                head * rows + first, &coded_[head * tiles + number]};
    }

    std::int64_t query_of(std::int64_t row) const { return row % rows % queries.n; }
    std::int64_t at(const Tile& tile, std::int64_t chunk) const {
        return codes.at(chunk, tile.head);
    }

    // Bits of the tokens of a chunk that some row of a tile sees. Returns how many.
    std::int64_t seen(const Tile& tile, std::int64_t chunk, std::uint64_t* bits) const;

  private:
    std::vector<FlatTile> coded_;  // [heads][tiles]
};

}  // namespace kvdb::indexes::flat
