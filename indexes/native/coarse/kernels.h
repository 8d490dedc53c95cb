// Pages of tokens by their representatives: the seam between driver and the code of one instruction
// set.
#pragma once

#include <cstdint>

#include "../blocks.h"
#include "isa.h"

namespace kvdb::indexes::coarse {

inline constexpr int kPageGroup = 16;       // pages whose codes lie together, as lanes of a vector
inline constexpr int kChannelBlocks = 8;    // parts of a key whose residuals are bounded apart
inline constexpr float kCodeZero = 128.0f;  // the code of 0: codes are unsigned, queries signed

// Codes of one kind for the pages of one KV head in one segment:
// [groups][dims / 4][kPageGroup][4] bytes; the value of a code is (code - zero) * scale of its
// page.
struct Codes {
    const std::uint8_t* codes;  // null where a kind of index keeps none
    const float* scales;        // [pages]
    int dims;
};

// One row of queries against such codes: value = sum(byte * code) * scale + base.
struct ByteQuery {
    const std::int8_t* bytes;  // [dims]
    std::int32_t start;        // takes the codes' zero back
    float scale;
};

struct ScanRow {
    ByteQuery center, farthest, radius;
    float base;          // q.k of where the segment's keys were shifted to
    float slack;         // what rounding may hide
    const float* count;  // [pages] visible tokens of each page
    float* middle;       // [pages] out: q.k of the representative; -inf where no token is visible
    float* reach;        // [pages] out: no token's q.k lies farther above it
    float* priority;     // [pages] out, or null
    float* best;         // [pages / kPageGroup] out: the largest priority of each group
    float most[2 * kPageGroup] = {};  // in and out: the largest middle and reach of each lane
    float squares[kPageGroup] = {};   // in and out: the sum over tokens of reach squared
};

// The priority of a page: max(middle + margin * reach, q.k of its farthest key).
struct ScanItem {
    Codes center, farthest, radius;
    float margin;
    std::int64_t groups;
    ScanRow* rows;
    int count;
};

// A group of pages of one row. Their priorities are priority[kPageGroup], or where that is null,
// middle + margin * reach.
struct ReachItem {
    const float *middle, *reach, *priority;
    float margin, threshold;
};

// Sums over pages of weights[i] * 2^(factor * (middle[i] + more) - reference). In the bound, more
// is reach[i]; in the estimate it is curve * reach[i]^2, at most reach[i], because tokens lie
// around the middle. Pages whose middle is -inf add 0. If each is given, the terms of the estimate,
// times `share`, are added to each[i]. The two sums have references of their own, because a reach
// may lie far above the likely scores.
struct MassItem {
    const float* middle;
    const float* reach;
    const float* weights;
    std::int64_t count;
    float curve, factor;
    float likely_reference = 0, bound_reference = 0;
    float* each = nullptr;  // [count] or null
    float share = 0;
    double total = 0, estimate = 0, bound = 0;  // out: total of the weights
    double each_total = 0;                      // out: the sum of each[count]
};

// Splits scores [count] at the threshold: the positions of those at or above it, ascending, and the
// sum of 2^(factor * (score - reference)) over those below it. A score of -inf belongs to neither.
// below: that power for each score below the threshold, and 0 for all other scores; or null.
struct SiftItem {
    const float* scores;
    std::int64_t count;
    float threshold, reference, factor;
    std::int32_t* candidates;  // [count]
    float* below;              // [count]
    std::int64_t candidate_count;
    double others;
};

// The nearest of `clusters` centroids for each of `count` vectors x [count][dims] in float32.
// centroids: [clusters / kPageGroup][dims][kPageGroup]; halves: [clusters] half their squared
// lengths, +inf for those that are none.
struct AssignItem {
    const float* x;
    const float* centroids;
    const float* halves;
    std::int64_t count, clusters;
    int dims;
    std::int32_t* nearest;
    float* distances;  // [count] |c|^2 / 2 - x.c
};

// out [rows][dims] += weights [rows][count] * values [count][dims].
struct BlendItem {
    const BFloat16* values;
    const float* weights;
    std::int64_t count;
    int rows, dims;  // a multiple of 8
    float* out;
};

struct CoarseKernels {
    void (*scan)(const ScanItem&);
    // A bit for each page whose priority is not below the threshold, or is no number.
    std::uint32_t (*reaching)(const ReachItem&);
    // The largest factor * (middle[i] + more) of the estimate, of pages that have weight.
    float (*likely)(const MassItem&);
    void (*mass)(MassItem&);
    void (*sift)(SiftItem&);
    void (*assign)(const AssignItem&);
    void (*blend)(const BlendItem&);
};

KVDB_DECLARE_PER_ISA(CoarseKernels, coarse);
#if defined(__x86_64__)
extern const CoarseKernels coarse_amx, coarse_amx_emulated;
#endif

const CoarseKernels& coarse_kernels();

}  // namespace kvdb::indexes::coarse
