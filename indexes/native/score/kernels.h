// Exact scores of chosen tokens: the interface between the drivers and the code of one instruction
// set.
#pragma once

#include <cstdint>

#include "../blocks.h"
#include "isa.h"

namespace kvdb::indexes {

// q.k of each of `rows` queries with each of `count` tokens of one KV head. A key is read once for
// all rows.
struct ScoreItem {
    Blocks blocks;
    int kv_head;
    const float* queries;  // [rows][head_dim]
    std::int64_t rows;
    const std::int32_t* tokens;
    std::int64_t count;
    float* scores;  // [rows][count], with score_stride floats between rows
    std::int64_t score_stride;
};

// Keys [begin, begin + count) of one KV head as float32 [count][head_dim].
struct WidenItem {
    Blocks blocks;
    int kv_head;
    std::int64_t begin, count;
    float* out;
};

struct ScoreKernels {
    void (*score[kDtypes])(const ScoreItem&);
    void (*widen_keys[kDtypes])(const WidenItem&);
    void (*widen_values[kDtypes])(const WidenItem&);
};

KVDB_DECLARE_PER_ISA(ScoreKernels, score);

const ScoreKernels& score_kernels();

// The same, once what they read is in memory. Throw PageError where it cannot be.
void score_tokens(const ScoreItem& item);
void widen_keys(const WidenItem& item);
void widen_values(const WidenItem& item);

}  // namespace kvdb::indexes
