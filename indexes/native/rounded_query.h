// Queries in the form in which codes are scored.
#pragma once

#include <cstdint>

#include "geometry.h"

namespace kvdb::indexes {

// A query, rotated and rounded to 8 bits: step * bytes.
struct RoundedQuery {
    std::int32_t packed[kHeadDimMax / 4];  // four dimensions each
    float step;
    float sum;  // of the bytes
};

// Rounds a query. rest [head_dim]: what rounding took from it.
RoundedQuery round_query(const float* q, int head_dim, float* rest);

}  // namespace kvdb::indexes
