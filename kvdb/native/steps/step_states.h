// What a step computes on its way: states of all query heads in float32, and their merges.
#pragma once

#include <vector>

#include "step.h"

namespace kvdb {

// A state of every query head.
struct States {
    std::vector<float> out, lse;  // [q_heads][value_dim], [q_heads]

    States(std::int64_t rows, int value_dim) : out(rows * value_dim), lse(rows, -INFINITY) {}
};

// Leaves out the last tokens.
void shorten(StepBlocks& blocks, std::int64_t tokens);

// Attention of a query over blocks, for KV heads [kv_begin, kv_end). top: optional, [q_heads], the
// largest q.k.
void attend_blocks(const StepPlan& plan, const Rows& query, const StepBlocks& blocks, States& to,
                   float* top, int kv_begin, int kv_end);

// Merges other states and the values of tokens found, whose run is `table`, into `from`; either may
// be null. out, lse: where the result goes; may be those of `from`.
void merge_states(const StepPlan& plan, const States& from, const States* other,
                  const indexes::SearchResult* found, const std::uint64_t* table, void* out,
                  Dtype out_dtype, float* lse);
void merge_into(const StepPlan& plan, States& states, const States& other);

// Adds a logit of each query head, which has no value; -inf for none.
void add_sinks(States& states, const float* sinks);

// log(exp(a) + exp(b)); NaN if one is.
float log_sum(float a, float b);

bool all_finite(const std::vector<float>& values);
// Whether all are finite or -inf.
bool finite_or_none(const std::vector<float>& lse);

}  // namespace kvdb
