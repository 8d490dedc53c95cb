// The flat index: the data it keeps of each key, and the interface between the drivers and the code
// of one instruction set.
//
// Keys come in chunks. A chunk's keys are taken relative to its centre and rotated, so that no
// dimension stands out, then coded with 8 bits a dimension in two planes of 4: the high plane alone
// is a coarser code. Each key has a scale and three lengths, each rounded up: the length of the
// key, and the lengths of the two codes' residuals. By Cauchy-Schwarz they bound the error of every
// estimated q.k, and the length alone bounds q.k. The signs of each key lie apart, with a scale and
// an error of their own: where few keys are long enough, their signs are looked at one by one.
#pragma once

#include <cstdint>

#include "../blocks.h"
#include "../chunks.h"
#include "isa.h"
#include "query_rows.h"

namespace kvdb::indexes::flat {

inline constexpr int kChunkWords = kChunk / 64;  // of a bitmap
inline constexpr int kKeyGroup = 16;             // keys whose codes lie together
inline constexpr int kChunkGroups = kChunk / kKeyGroup;
inline constexpr int kTile = 4;  // query rows that share a read

// Planes of bfloat16 [kChunk] in a chunk's lengths.
enum Length : int { kNorm, kScale, kHighError, kError, kLengths };

// The data of the chunks; [chunks][kv_heads][...].
struct FlatCodes {
    static constexpr bool kSymmetric = false;  // of keys alone, whatever the values are
    int kv_heads, head_dim;
    float* centres;          // [head_dim + 1]: the centre, then the largest length of a key
    std::uint16_t* lengths;  // [kLengths][kChunk]
    std::uint8_t* high;     // [kChunkGroups][head_dim / 8][kKeyGroup][4]: dimensions d and d + 4 of
    std::uint8_t* low;      // eight in one byte
    std::uint8_t* signs;    // [kChunk][sign_bytes]
    std::int32_t* longest;  // the token of the largest kNorm

    std::int64_t at(std::int64_t chunk, int kv_head) const { return chunk * kv_heads + kv_head; }
    float* centre(std::int64_t at) const { return centres + at * (head_dim + 1); }
    std::uint16_t* length(std::int64_t at, Length which) const {
        return lengths + (at * kLengths + which) * kChunk;
    }
    std::int64_t plane_bytes() const { return std::int64_t{kChunk} * head_dim / 2; }
    // A bit for each dimension, set where it is not negative; scale and error, bfloat16.
    static constexpr int sign_bytes(int head_dim) { return head_dim / 8 + 4; }
    std::uint8_t* sign(std::int64_t at, int slot) const {
        return signs + (at * kChunk + slot) * sign_bytes(head_dim);
    }
};

// Up to kTile queries, rotated and rounded to 8 bits. Rows behind the last one repeat it.
struct FlatTile {
    const float* queries[kTile];
    std::int32_t packed[kTile][kHeadDimMax / 4];  // of the rounded query: four dimensions each
    float step[kTile];                            // rounded to the query
    float sum[kTile];                             // of the rounded query
    float norm[kTile];                            // of the query, rounded up
    float error[kTile];                           // of what rounding took away, rounded up
};

// One chunk of one KV head for one tile. base: q.centre.
struct FlatScan {
    const FlatTile* tile;
    int head_dim;
    const std::uint16_t* lengths;  // [kLengths][kChunk]
    const std::uint8_t* high;
    const std::uint8_t* low;
    const std::uint8_t* signs;
    float base[kTile];
    float slack[kTile];  // what rounding in float32 can add, at most
};

// Which of `count` keys may reach some row's threshold, by their signs.
struct FlatSieve {
    FlatScan scan;
    float threshold[kTile];
    int count;
    std::uint16_t keys[kChunk];  // in and out
};

// Bounds of the keys in `groups`; a key is kept if it may reach some row's threshold.
struct FlatPrune {
    FlatScan scan;
    float threshold[kTile];
    std::uint64_t groups;             // a bit for each group of keys
    std::uint64_t kept[kChunkWords];  // out
    float upper[kTile][kChunk];       // out: the bound, where the group's bit is set
    int refined;                      // out: groups whose low plane was read
};

// Sums of exp(scale * (x - cap)) over the keys whose bit is set, where x is the estimate or its
// bound, but at most the row's cap.
struct FlatMass {
    FlatScan scan;
    float scale;
    float cap[kTile];
    std::uint64_t keys[kTile][kChunkWords];
    double estimate[kTile];  // out: added to
    double bound[kTile];     // out: added to
};

struct FlatKernels {
    // Clears the bits of keys whose length, as bfloat16, is below `length`. Returns how many are
    // left.
    int (*at_least)(const std::uint16_t* lengths, std::uint16_t length, std::uint64_t* bits);
    void (*dot)(const FlatTile& tile, const float* centre, int head_dim, float* out);  // [kTile]
    void (*sieve)(FlatSieve&);
    void (*prune)(FlatPrune&);
    void (*mass)(FlatMass&);
};

KVDB_DECLARE_PER_ISA(FlatKernels, flat);

const FlatKernels& flat_kernels();

}  // namespace kvdb::indexes::flat
