// Keys as codes, and distances of keys: the interface between the drivers and the code of one
// instruction set.
#pragma once

#include <cstdint>

#include "../blocks.h"
#include "isa.h"

namespace kvdb::indexes::graph {

inline constexpr int kCodeStep = 64;  // bytes of a code are padded to a multiple of this

// Estimates of q.k: bias + factor * (the code's bytes times the query's). A code is read once for
// all rows.
struct EstimateItem {
    const std::uint8_t* codes;  // of `stride` bytes, zeros behind head_dim
    std::int64_t stride;
    std::int64_t apart;           // bytes from one code to the next
    const std::uint32_t* tokens;  // or null: 0, 1, 2 and so on
    std::int64_t count;
    const std::int8_t* queries;  // [rows][stride]
    const float* factor;         // [rows]
    const float* bias;           // [rows]
    std::int64_t rows;
    float* out;  // [rows][out_stride]
    std::int64_t out_stride;
};

// Codes of the keys [begin, begin + count) of one KV head: round((k - low) / step), 0 to 255.
struct EncodeItem {
    Blocks blocks;
    int kv_head;
    std::int64_t begin, count;
    const float* low;     // [head_dim]
    const float* step;    // [head_dim], above 0
    std::uint8_t* codes;  // of `stride` bytes
    std::int64_t stride;
    std::int64_t apart;  // bytes from one code to the next
    float* residual;     // [count], the length of what the code leaves of the key
};

// Squared distances of one vector to `count` keys of one KV head.
struct DistanceItem {
    Blocks blocks;
    int kv_head;
    const float* vector;  // [head_dim]
    const std::uint32_t* tokens;
    std::int64_t count;
    float* out;
};

struct GraphKernels {
    void (*estimate)(const EstimateItem&);
    void (*encode[kDtypes])(const EncodeItem&);
    void (*distance[kDtypes])(const DistanceItem&);
    // The sum of exp(scale * (score - largest)); no score is larger than that, -inf counts nothing.
    float (*mass)(const float* scores, std::int64_t count, float largest, float scale);
};

KVDB_DECLARE_PER_ISA(GraphKernels, graph);

const GraphKernels& graph_kernels();

}  // namespace kvdb::indexes::graph
