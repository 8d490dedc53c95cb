// What a model selects by itself, by the keys of its indexer, and exact attention over it.
#pragma once

#include "attend.h"

namespace kvdb {

inline constexpr int kIndexerHeadsMax = 1024;

// Queries of the last n tokens of a run.
struct IndexerCall {
    Geometry geometry;     // of one KV head
    const float* queries;  // [heads, n, head_dim]
    const float* weights;  // [heads, n]
    int heads;
    std::int64_t n;
    Run run;
};

// out, [n, tokens of the run]: for each query the sum over the heads of weight * max(0, q . k),
// also of tokens behind its own.
void indexer_scores(const IndexerCall& call, float* out);

// ids, [n, top]: the tokens of the largest scores among those that each query sees, up to its own,
// ascending; of equal scores the earlier token goes first. found, [n]: how many they are.
void indexer_select(const IndexerCall& call, std::int64_t top, std::int32_t* ids,
                    std::int32_t* found);

// Attention of each query over its own choice of tokens.
struct AttendChosenCall {
    AttendCall all;           // every KV head, and neither causal, ends, window nor placement
    const std::int32_t* ids;  // [n, ids_stride], the first found[i] of a row, ascending: positions
                              // among the tokens of the run
    std::int64_t ids_stride;
    const std::int32_t* found;  // [n]
};

// Throws std::invalid_argument for tokens that are not of the run.
void attend_chosen(const AttendChosenCall& call);

}  // namespace kvdb
