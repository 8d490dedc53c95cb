// Moves tokens to other positions: keys are rotated, and rows picked one by one.
#pragma once

#include "transfer.h"

namespace kvdb {

// Copies n tokens like `copy`, and rotates their keys forward by the angles of `turn`.
void place(const Geometry& geometry, const Table& from, std::int64_t from_start, const Table& to,
           std::int64_t to_start, std::int64_t n, const Rotation& rotation);

// Positions of tokens in a run, in any order; if a position comes twice, the later token wins.
struct Positions {
    const std::int64_t* at;
    std::int64_t count;
};

// Token from_start + i of the one run goes to position at[i] of the other.
void scatter(const Geometry& geometry, const Table& from, std::int64_t from_start, const Table& to,
             const Positions& positions);

// Reads the tokens at the positions. values: as in `gather`.
void gather_at(const Geometry& geometry, const Table& table, const Positions& positions,
               const Rows& keys, const Rows& values);

// out[h, i] = rows[h, i], of the geometry's type, rotated back; to_float: out is float32. In place
// if `out` is `rows`.
void rotate_back(const Geometry& geometry, int heads, std::int64_t n, const Rows& rows,
                 const Rotation& rotation, const Rows& out, bool to_float);

}  // namespace kvdb
