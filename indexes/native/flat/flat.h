// Building, searching and checking the flat index. Drivers: threads and memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "../score/kernels.h"
#include "kernels.h"
#include "query_rows.h"

namespace kvdb::indexes::flat {

// Codes the keys of tokens [coded, blocks.tokens). A chunk's centre is the mean of the keys it
// began with.
void insert(const Blocks& blocks, const FlatCodes& codes, std::int64_t coded);

// What a search looks for: everything within `beta` of a row's largest q.k, or, with k > 0, the k
// largest.
struct FlatOptions {
    float beta;
    std::int64_t k;
    bool give_up;  // rows whose range is so dense that reading all costs less
};

// The estimate of what was missed is that of a sample.
struct FlatResult : SearchResult {
    std::vector<float> caps;  // [q_heads * n] no visible token that was not retrieved exceeds it
};

FlatResult search(const Blocks& blocks, const FlatCodes& codes, const QueryRows& queries,
                  const FlatOptions& options, float scale);

// The log of the sum of exp(scale * q.k) over the visible tokens that were not retrieved: an
// estimate, and a bound that is never below the truth. Reads all codes. offsets, ids: as
// RetrievedRows. Rows whose cap is +inf are left as they are.
void missed_mass(const Blocks& blocks, const FlatCodes& codes, const QueryRows& queries,
                 const std::int64_t* offsets, const std::int32_t* ids, const float* caps,
                 float scale, float* missed, float* bound);

// The number of keys that lie outside of the bounds of their codes.
std::int64_t verify(const Blocks& blocks, const FlatCodes& codes);

// ---- what the drivers share

FlatTile make_tile(const QueryRows& queries, int head_dim, int kv_head, std::int64_t tile);

// The scan of one chunk for a tile; false if the chunk's centre or the queries are so large that no
// bound can be computed.
FlatScan make_scan(const FlatCodes& codes, const FlatTile& tile, std::int64_t at);

// Bits of the tokens of a chunk that query i sees. Returns how many.
std::int64_t visible_bits(const QueryRows& queries, std::int64_t i, std::int64_t chunk,
                          std::uint64_t* bits);

// How many tokens query i sees.
std::int64_t count_visible(const QueryRows& queries, std::int64_t i);

}  // namespace kvdb::indexes::flat
