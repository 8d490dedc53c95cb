// Exact attention over a run of blocks.
#pragma once

#include "../kernels/kernels.h"

namespace kvdb {

struct AttendCall {
    Geometry geometry;
    BlockFormat format;  // of all blocks; set by attend
    Rows query;          // [q_heads, n, head_dim] of the geometry's type
    int q_heads;
    std::int64_t n;
    Run run;
    int kv_begin, kv_end;  // KV heads that are attended; rows of others are left as they are
    // The last `causal` tokens of the run are the new ones: 0 (every query sees all tokens), or n.
    std::int64_t causal;
    const std::int64_t* ends;  // optional, [n], ascending: query i sees the first ends[i] tokens
    // Where it is not 0, every query sees only the last so many of these tokens.
    std::int64_t window;
    const std::int64_t* begins;  // [n], or null; set by attend where there is a window
    float scale;
    const float* sinks;  // optional, [q_heads]: a logit more, without a value; -inf for none
    Rows out;            // [q_heads, n, value_dim]
    Dtype out_dtype;
    float* lse;       // optional, [q_heads, n], contiguous
    float* top;       // optional, as lse: the largest q.k, -inf where nothing is seen
    int threads_max;  // 0: as many as pay
};

// out = softmax(scale * q K^T) V and lse = log sum exp(scale * q K^T), accumulated in float32. A
// query that sees no token gets out 0 and lse -inf. A sink weighs in the sum as a token would whose
// value is 0, and raises no top. Query head h reads KV head
// h / (q_heads / kv_heads). Throws std::invalid_argument if counts, causal, ends or window make no
// sense.
//
// The lowest bits of a block's address tell its format (kFormatMask); attend sorts blocks by them.
void attend(const AttendCall& call);

// The same over blocks of one format, whose addresses are plain.
void attend_uniform(const AttendCall& call);

// From now on, attends of this thread are for another process of this machine, which has an answer
// sooner if it waits awake: a short attend leaves a processor to it.
void leave_processor();

// How many threads attend uses for a query of each query head over so many tokens.
int attend_threads(const Geometry& geometry, std::int64_t tokens);

// What attend throws.
void check_attended(const AttendCall& call);

struct AttendRetrievedCall {
    Geometry geometry;
    const std::uint64_t* table;
    int q_heads;
    std::int64_t n;
    const std::int64_t* offsets;  // [q_heads * n + 1]
    const std::int32_t* ids;
    const float* scores;
    float scale;
    const float* state_out;  // [q_heads, n, value_dim]
    const float* state_lse;  // [q_heads, n]
    const float* tail_out;   // [q_heads, n, value_dim] of other states, or null
    const float* tail_lse;   // [q_heads, n]
    const float* sinks;      // optional, [q_heads]; see AttendCall
    void* out;               // [q_heads, n, value_dim]; may be state_out
    Dtype out_dtype;
    float* lse;  // [q_heads, n]; may be state_lse
};

// The state of each row merged with the attention over its chosen tokens, whose scores are known.
void attend_retrieved(const AttendRetrievedCall& call);

struct Share {
    double mean, largest;
};

// The share of exp(missed) in exp(missed) + exp(lse): 1 for +inf, 0 where both are -inf.
Share share_of(const float* missed, const float* lse, std::size_t count);

}  // namespace kvdb
