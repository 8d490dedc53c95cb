// Exact attention over a run of blocks.
#pragma once

#include "kernels.h"

namespace kvdb {

struct AttendCall {
    Geometry geometry;
    Rows query;  // [q_heads, n, head_dim] of the geometry's type
    int q_heads;
    std::int64_t n;
    Run run;
    // The last `causal` tokens of the run are the new ones: 0 (every query sees all tokens), or n.
    std::int64_t causal;
    float scale;
    Rows out;
    Dtype out_dtype;
    float* lse;  // optional, [q_heads, n], contiguous
};

// out = softmax(scale * q K^T) V and lse = log sum exp(scale * q K^T), accumulated in float32. A
// query that sees no token gets out 0 and lse -inf. Query head h reads KV head
// h / (q_heads / kv_heads). Throws std::invalid_argument if counts or causal make no sense.
void attend(const AttendCall& call);

}  // namespace kvdb
