#include "batch.h"

namespace kvdb::indexes::flat {

Batch::Batch(const Blocks& blocks, const FlatCodes& codes, const QueryRows& queries)
    : blocks(blocks),
      codes(codes),
      queries(queries),
      heads(blocks.geometry.kv_heads),
      rows(queries.rows()),
      tiles((rows + kTile - 1) / kTile),
      active(queries.heads(blocks.geometry.kv_heads)),
      coded_(heads * tiles) {
    for (std::int64_t i = 0; i < queries.n; ++i) {
        begin = std::min(begin, queries.begin[i]);
        end = std::max(end, queries.end[i]);
        visible.push_back(count_visible(queries, i));
    }
    if (begin >= end) return;
    first_chunk = begin / kChunk;
    chunks = chunks_of(end) - first_chunk;
}

void Batch::prepare(int head, std::int64_t number) {
    coded_[head * tiles + number] = make_tile(queries, codes.head_dim, head, number);
}

std::int64_t Batch::seen(const Tile& tile, std::int64_t chunk, std::uint64_t* bits) const {
    std::int64_t count = visible_bits(queries, query_of(tile.first_row), chunk, bits);
    if (queries.n == 1) return count;
    std::uint64_t more[kChunkWords];
    for (int r = 1; r < tile.rows; ++r) {
        visible_bits(queries, query_of(tile.row(r)), chunk, more);
        for (int w = 0; w < kChunkWords; ++w) bits[w] |= more[w];
    }
    count = 0;
    for (int w = 0; w < kChunkWords; ++w) count += __builtin_popcountll(bits[w]);
    return count;
}

}  // namespace kvdb::indexes::flat
