// Re-ranks what a beam search retrieved for one query by exact scores, and estimates what it
// missed.
#pragma once

#include <cstdint>

#include "query_group.h"
#include "range.h"

namespace kvdb::indexes::graph {

// The estimates of the random probes, and an upper bound of every key's estimate.
struct ProbeScores {
    float* scores;      // [probes.random], kNone for those the query does not see; overwritten
    std::int64_t seen;  // of those
    float highest;
};

void rerank(const QueryGroup& group, std::int64_t r, Range& range, const ProbeScores& probes,
            RowResult& out);

}  // namespace kvdb::indexes::graph
