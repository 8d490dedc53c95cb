// Exact attention of one query of each of several sessions, whose runs may begin alike.
#pragma once

#include <vector>

#include "../attend/attend.h"

namespace kvdb {

// A session's query and its run. All arrays are of the caller.
struct ExactStep {
    Rows query;  // [q_heads][1][head_dim] of the geometry's type
    Run run;
    void* out;            // [q_heads][1][value_dim] of the geometry's type, contiguous
    float* lse;           // [q_heads]
    float* top;           // [q_heads] the largest q.k, or null
    const float* sinks;   // optional, [q_heads]; see AttendCall
    std::int64_t window;  // the query sees the last so many tokens; 0: all
    std::int64_t nbytes;  // out: of keys and values; of what was shared, the session's part
};

// Attends every query to all of its run. Blocks with which several runs begin are read once for all
// of them, where they hold so many tokens.
void attend_steps(const Geometry& geometry, int q_heads, float scale,
                  std::int64_t shared_tokens_min, std::vector<ExactStep>& steps);

}  // namespace kvdb
