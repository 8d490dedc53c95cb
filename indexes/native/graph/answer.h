// What a walk has found for one query, by exact scores, and what it may have missed.
#pragma once

#include <cstdint>

#include "range.h"
#include "task.h"

namespace kvdb::indexes {

// The estimates of the random probes, and what no key's estimate can be above.
struct ProbeScores {
    float* scores;      // [probes.random], kNone for those the query does not see; overwritten
    std::int64_t seen;  // of those
    float highest;
};

void answer(const Task& task, std::int64_t r, Range& range, const ProbeScores& probes,
            RowFound& out);

}  // namespace kvdb::indexes
