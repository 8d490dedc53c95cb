// A graph over the keys of each KV head, and the codes of these keys.
#pragma once

#include <cstdint>
#include <vector>

#include "../blocks.h"
#include "kernels.h"
#include "query_rows.h"

namespace kvdb::indexes::graph {

// Arrays have room for `capacity` tokens of each head. A link to a token beyond `tokens` ends a
// list, so that no content of `links` can lead a search out of bounds.
struct Graph {
    int kv_heads, head_dim, degree;
    std::int64_t tokens, capacity, stride;
    std::int64_t code_step, link_step;  // from one token's to the next one's, in elements
    std::uint8_t* codes;                // [kv_heads][capacity], each of `stride` bytes
    float* residual;                    // [kv_heads][capacity], what a code leaves of its key
    std::uint32_t* links;               // [kv_heads][capacity], each of `degree`
    const float* low;                   // [kv_heads][head_dim], a key is low + step * code
    const float* step;

    const std::uint8_t* codes_of(int head) const { return codes + head * capacity * code_step; }
    std::uint32_t* links_of(int head) const { return links + head * capacity * link_step; }
};

// Entry points of searches. Their codes lie together.
struct Probes {
    const std::int32_t* tokens;  // [kv_heads][count], first `random` that were drawn at random
    const std::uint8_t* codes;   // [kv_heads][count][stride]
    std::int64_t count, random;
    const std::int32_t*
        outliers;  // [kv_heads][outlier_count], keys that codes do not hold well, or -1
    const std::uint8_t* outlier_codes;  // [kv_heads][outlier_count][stride]
    const float* outlier_residual;      // [kv_heads][outlier_count]
    std::int64_t outlier_count;
    const float* radius;  // [kv_heads] the largest residual
};

struct GraphOptions {
    float beta;      // the range in units of q.k
    std::int64_t k;  // above 0: the k largest instead
    float scale;
    bool listed;         // the paper's form: candidates in the order in which they were met
    bool share;          // the query heads of a group search together
    bool give_up;        // rows whose range is too dense are left unanswered
    int patience;        // steps outside of the range
    std::int64_t least;  // listed: candidates taken whatever their score
    float slack;         // how far beyond the range tokens are expanded, in betas
    float dense_share;   // of the visible tokens: a row with more candidates gives up
    float budget;        // of the visible tokens: a search that scores more gives up its rows
};

// The result of one row, before the results of all rows are joined.
struct RowResult {
    std::vector<std::int32_t> ids;
    std::vector<float> scores;
    float missed = -__builtin_inff(), bound = -__builtin_inff();
    bool dense = false;
};

// Codes the keys of tokens [begin, end) of a head.
void encode(const Graph& graph, const Blocks& blocks, int kv_head, std::int64_t begin,
            std::int64_t end);

// Links the tokens [begin, graph.tokens) of every head to their nearest keys and back. parents:
// those that `repair` wrote for earlier tokens; those of the new tokens are added.
void insert(const Graph& graph, const Blocks& blocks, std::int64_t begin, int width,
            std::uint32_t* parents);

// Adds links from each pivot to its candidates, pruned, and back where there is room.
void connect(const Graph& graph, const Blocks& blocks, int kv_head, const std::int32_t* pivots,
             std::int64_t count, const std::int64_t* offsets, const std::int32_t* candidates);

// HNSW's rule (algorithm 4 of the paper): of candidates[offsets[i], offsets[i + 1]) of each token
// begin + i up to `most`, to chosen [count][most], the nearest last, then none. A list that is no
// longer is kept whole. The token itself, what comes twice and what is no token are left out.
void choose_links(const Graph& graph, const Blocks& blocks, int kv_head, std::int64_t begin,
                  std::int64_t count, const std::int64_t* offsets, const std::int32_t* candidates,
                  int most, std::uint32_t* chosen);

// Adds links so that every token can be reached from token 0; returns how many tokens could not be.
// parents [kv_heads][capacity]: for each token one that links to it, on a way from token 0.
std::int64_t repair(const Graph& graph, std::uint32_t* parents);

SearchResult search(const Graph& graph, const Probes& probes, const Blocks& blocks,
                    const QueryRows& queries, const GraphOptions& options);

// bound [q_heads * n]: an upper bound of the log of the sum of exp(scale * q.k) over the visible
// tokens that are not in ids[offsets[row], offsets[row + 1]), which ascend.
void bound(const Graph& graph, const QueryRows& queries, float scale, const std::int64_t* offsets,
           const std::int32_t* ids, float* bound);

// The number of tokens that cannot be reached from token 0.
std::int64_t verify(const Graph& graph, int kv_head);

}  // namespace kvdb::indexes::graph
