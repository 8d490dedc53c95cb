// The quantized index: what it keeps of each key and value, and the seam between driver and the
// code of one instruction set.
//
// Tokens come in chunks. A chunk's keys and values are taken relative to their means and rotated,
// so that no dimension stands out, then coded with 4 bits a dimension and a scale for each token. A
// run of tokens shares the bounds of what codes leave of its keys. A run whose numbers are too
// large to be coded has an infinite bound, and is read as it was stored.
#pragma once

#include <cstdint>

#include "../blocks.h"
#include "../chunks.h"
#include "../rounded_query.h"
#include "isa.h"

namespace kvdb::indexes::quantized {

inline constexpr int kRun = 64;  // tokens that share bounds
inline constexpr int kRuns = kChunk / kRun;
inline constexpr int kGroup = 16;                         // strata of a block
inline constexpr int kBlock = 256;                        // tokens whose strata lie together
inline constexpr int kStrata = kChunk / kBlock * kGroup;  // of a chunk, 16 tokens each
inline constexpr int kUnit = 8;                           // tokens whose value codes lie together
inline constexpr int kSliceDims = 64;       // dimensions of a run's values that lie together
inline constexpr int kRowsMax = 4;          // query rows that share a read of values
inline constexpr int kScanRows = 16;        // and of keys
inline constexpr float kCodeMiddle = 7.5f;  // codes are 0 to 15
inline constexpr int kWeightMax = 127;      // weights of values are rounded to 0 to this

// What is kept of the chunks; [chunks][kv_heads][...].
struct Codes {
    static constexpr bool kSymmetric = true;  // values are coded too, as keys are
    int kv_heads, head_dim;
    float* centres;         // [2][head_dim] of keys, of values
    std::uint16_t* scales;  // [2][kChunk] bfloat16
    std::uint8_t* keys;    // [kRuns][head_dim / 8][kRun][4]: dimensions d and d + 4 of eight in one
                           // byte
    std::uint8_t* values;  // [kRuns][slices of value_dims][kRun / kUnit][dimensions of a slice][4]:
                           // tokens t and t + 4 of eight in one byte
    float* bounds;         // [2][kRuns]: the largest length of what a code leaves of a key, and of
                           // what the codes stand for

    static int value_dims(int head_dim) { return (head_dim + 15) / 16 * 16; }
    std::int64_t key_bytes() const { return std::int64_t{kChunk} * head_dim / 2; }
    std::int64_t value_bytes() const { return std::int64_t{kChunk} * value_dims(head_dim) / 2; }
    Codes at(std::int64_t chunk, int kv_head) const {
        const std::int64_t i = chunk * kv_heads + kv_head;
        return {1,
                head_dim,
                centres + i * 2 * head_dim,
                scales + i * 2 * kChunk,
                keys + i * key_bytes(),
                values + i * value_bytes(),
                bounds + i * 2 * kRuns};
    }
};

// Scores of the first runs of a chunk. base: q.centre.
struct ScanItem {
    Codes codes;
    int runs, rows;
    const RoundedQuery* query[kScanRows];
    float base[kScanRows];
    float* scores[kScanRows];   // [runs * kRun]
    float* largest[kScanRows];  // of each stratum of the chunk, [kStrata]
};

// Sums of 2^(factor * (score - reference)) over the first runs of a chunk, and of the values with
// these weights, rotated and less their centre. The reference is near the largest score.
struct SumItem {
    Codes codes;
    int runs, rows;
    float factor;
    float reference[kRowsMax];
    float least[kRowsMax];          // the values of a run of less mass are left out
    const float* scores[kRowsMax];  // [runs * kRun]
    float* values[kRowsMax];        // added to: [value_dims], or null for the mass alone
    float mass[kRowsMax];           // out
};

struct QuantizedKernels {
    void (*scan)(const ScanItem&);
    void (*largest)(const float* scores, float* out);  // of each stratum of a chunk, [kStrata]
    void (*sum)(SumItem&);
    // Of a multiple of kGroup values the largest; and how many are at least this, and which.
    float (*most)(const float* values, std::int64_t count);
    std::int64_t (*count)(const float* values, std::int64_t count, float least);
    std::int64_t (*collect)(const float* values, std::int64_t count, float least,
                            std::int32_t* out);
};

KVDB_DECLARE_PER_ISA(QuantizedKernels, quantized);
#if defined(__x86_64__)
extern const QuantizedKernels quantized_amx, quantized_amx_emulated;
#endif

const QuantizedKernels& quantized_kernels();

}  // namespace kvdb::indexes::quantized
