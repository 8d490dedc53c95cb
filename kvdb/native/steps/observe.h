// Measures of one query of each query head, from the result of a search.
#pragma once

#include <cstdint>

namespace kvdb {

struct RetrievedRows {
    std::int64_t rows;
    const std::int64_t* offsets;  // [rows + 1]
    const float* scores;          // [offsets[rows]]
    const std::uint8_t* dense;    // optional, [rows], not 0 where the search gave up the row
};

// Raises top, [rows], to the largest score of each row; to infinity where the search gave up the
// row.
void raise_top(const RetrievedRows& retrieved, float* top);

struct ObserveCall {
    RetrievedRows retrieved;
    const std::uint8_t* active_heads;  // optional, [kv_heads], not 0 where it was asked
    std::int64_t kv_heads;
    double tokens;
    const float* window;  // [rows]: the largest score outside of what was searched
    const float* top;     // [rows]: the largest of all, not finite where it is not known
    const float* lse;     // [rows]
    float scale;
    float* values;  // [4, rows]: retrieved, dense, sharpness, window_hits
    bool* seen;     // the same: which of them are known
};

// Returns whether all values are known.
bool observe(const ObserveCall& call);

}  // namespace kvdb
