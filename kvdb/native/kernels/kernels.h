// The interface between the portable drivers and the code compiled for one instruction set.
//
// Each simd/<isa>.cpp is compiled with its own flags and fills one `Kernels`. Only plain data
// crosses it: if two such units shared a function, the linker could take the version of the wrong
// one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block_format.h"
#include "geometry.h"
#include "isa.h"
#include "run.h"

namespace kvdb {

// [heads, tokens, dimensions], last dimension contiguous, strides in elements.
struct Rows {
    void* data;
    std::int64_t head_stride;
    std::int64_t token_stride;
};

// Softmax attention before the division: for each row the sum of exp2(s - max) * value, the sum of
// exp2(s - max), and max, where s = q.k * scale * log2(e). An item's rows are [heads][rows].
struct State {
    float* values;  // [heads][rows][value_dim rounded up to kLanePadding]
    float* max;
    float* sum;
    std::int64_t rows;  // kDecodeRowsMax, or rounded up to kPrefillRowPadding
};

// One work item: rows [row_begin, row_end) of some KV heads over the tokens from `block` on up to
// `token_end`. Row r is query r / group of query head kv_head * group + r % group, so that
// neighbouring rows see nearly the same tokens.
struct AttendItem {
    Geometry geometry;
    Rows query;
    Run run;
    int kv_head, heads;  // the first, and how many; prefill takes one
    int group;           // query heads for each KV head
    std::int64_t row_begin, row_end;
    std::int64_t block, token_begin, token_end;
    // Query i sees the first ends[i] tokens of the run, or visible_first + i * visible_step.
    const std::int64_t* ends;  // ascending, or null
    std::int64_t visible_first;
    int visible_step;
    const std::int64_t* begins;  // ascending, or null: query i sees nothing before begins[i]
    float scale_log2e;
    State state;
    std::byte* scratch;
};

// The first `tokens` keys and values, [tokens][head_dim], of one KV head of a block. error, norm:
// to which the squared lengths of what rounding changed, and of the rows, are added, of keys and of
// values.
struct QuantizeItem {
    Geometry geometry;
    int key_bits, value_bits;
    const std::byte *keys, *values;
    int tokens;
    std::byte* to;
    float* scratch;
    double *error, *norm;
};

// Tokens [begin, end) of one KV head of a quantized block, as rows of the geometry's type.
struct DequantizeItem {
    Geometry geometry;
    int key_bits, value_bits;
    const std::byte* from;
    int begin, end;
    std::byte *keys, *values;
    std::int64_t key_stride, value_stride;  // bytes
};

// Divides and writes rows [row_begin, row_end): the log-sum-exp merge of consecutive states. sinks:
// optional, [q_heads], logits that weigh in the softmax and have no value; -inf for none.
struct FinishItem {
    State state;  // the first
    int splits;
    std::int64_t step;  // rows between states
    Rows out;
    Dtype out_dtype;
    float* lse;  // optional, [q_heads, n] with lse_stride floats between heads
    float* top;  // optional, as lse: the largest q.k, which is top_factor times the maximum kept
    float top_factor;
    std::int64_t lse_stride;
    const float* sinks;
    int kv_head, heads, group, value_dim;
    std::int64_t row_begin, row_end;
};

// The attention of one row over chosen tokens of its KV head, merged with one or two states that
// the row already has, and with a logit that has no value.
struct RetrievedItem {
    Geometry geometry;
    const std::uint64_t* table;
    int kv_head;
    const std::int32_t* ids;
    const float* scores;  // q.k of each
    std::int64_t count;
    float scale;
    const float* state_out;  // [value_dim]
    float state_lse;
    const float* tail_out;  // [value_dim] of another state, or null
    float tail_lse;
    float sink;  // -inf for none
    void* out;   // [value_dim]
    Dtype out_dtype;
    float* lse;
};

// Scores of tokens [token_begin, token_end) of a run, from `block` on, by keys of the only KV head:
// for each query the sum over the heads of weight * max(0, q . k).
struct ScoreItem {
    Geometry geometry;  // of keys alone
    Run run;
    std::int64_t block, token_begin, token_end;
    const float* queries;  // [heads][n][head_dim], a head's query_stride after the one before
    const float* weights;  // [heads][n], likewise
    std::int64_t query_stride, weight_stride;
    int heads;
    std::int64_t n;
    float* out;  // [n], a query's out_stride after the one before, [tokens of the run]
    std::int64_t out_stride;
    std::byte* scratch;
};

// Angles of the pairs of a row.
struct Rotation {
    const float *cos, *sin;  // [pairs]
    int pairs;
    bool interleaved;
};

// `rows` rows of head_dim elements.
struct RotateItem {
    void* to;
    const void* from;
    std::int64_t to_stride, from_stride;  // bytes
    std::int64_t rows;
    int head_dim;
    Rotation rotation;
    float direction;  // 1 forward, -1 back
    bool to_float;    // else of the same type
};

// `rows` rows of `row_bytes` (a multiple of 16).
struct CopyItem {
    std::byte* to;
    const std::byte* from;
    std::int64_t to_stride, from_stride;  // bytes
    std::int64_t rows;
    std::size_t row_bytes;
    bool stream;  // past the caches: the copy is larger than they are
};

inline constexpr int kDecodeRowsMax = 16;      // more rows than this are worth packing keys for
inline constexpr int kPrefillRowPadding = 96;  // states and scratch of prefill hold rows rounded up
                                               // to this, those of decode kDecodeRowsMax
inline constexpr int kLanePadding = 32;        // and dimensions rounded up to this

constexpr std::int64_t round_up(std::int64_t value, std::int64_t step) {
    return (value + step - 1) / step * step;
}

using AttendKernel = void (*)(const AttendItem&);
using ScoreKernel = void (*)(const ScoreItem&);
using RotateKernel = void (*)(const RotateItem&);
using RetrievedKernel = void (*)(const RetrievedItem&);
using QuantizeKernel = void (*)(const QuantizeItem&);
using DequantizeKernel = void (*)(const DequantizeItem&);
using CopyKernel = bool (*)(const CopyItem&);

struct Kernels {
    AttendKernel decode[kDtypes];
    AttendKernel prefill[kDtypes];
    std::size_t (*decode_scratch_bytes)(const Geometry& geometry, int heads, std::int64_t rows);
    std::size_t (*prefill_scratch_bytes)(const Geometry& geometry, std::int64_t rows);
    AttendKernel decode_quantized[kQuantizedFormats];
    std::size_t (*quantized_scratch_bytes)(const Geometry& geometry, int heads, std::int64_t rows);
    void (*finish)(const FinishItem&);
    RetrievedKernel retrieved[kDtypes];
    ScoreKernel score[kDtypes];
    std::size_t (*score_scratch_bytes)(const Geometry& geometry, std::int64_t rows);
    RotateKernel rotate[kDtypes];
    QuantizeKernel quantize[kDtypes];
    std::size_t (*quantize_scratch_bytes)(const Geometry& geometry);
    DequantizeKernel dequantize[kDtypes];
    CopyKernel copy;                  // returns true
    CopyKernel copy_finite[kDtypes];  // returns whether every element is finite
    std::uint64_t (*read)(const std::byte*, std::size_t bytes);  // xor of 64-bit words
};

KVDB_DECLARE_PER_ISA(Kernels, kernels);
#if defined(__x86_64__)
extern const Kernels kernels_amx, kernels_amx_emulated;
#endif

// The kernels of the instruction set that an operation uses, and of the best in use.
const Kernels& current_kernels(Operation operation);
const Kernels& current_kernels();

}  // namespace kvdb
