// Moves keys and values between arrays and runs of blocks, and between runs.
#pragma once

#include <optional>

#include "../kernels/kernels.h"

namespace kvdb {

// Blocks by their base addresses. Token p of such a run is slot p % block_size of block
// p / block_size: unlike in attention, every block counts with its full capacity.
struct Table {
    const std::uint64_t* blocks;
    std::int64_t size;
};

struct NotFinite {
    Plane plane;
    int kv_head;
    std::int64_t token;  // of the input
};

// Writes n tokens at [start, start + n); values are not looked at where a block has none of its
// own. If an element is NaN or infinite, returns the first such token, keys before values; then
// what [start, start + n) holds is unspecified.
std::optional<NotFinite> append(const Geometry& geometry, const Table& table, std::int64_t start,
                                std::int64_t n, const Rows& keys, const Rows& values);

// Whether every element of [heads, n, dims], of the geometry's type, is finite.
bool finite(const Geometry& geometry, int heads, std::int64_t n, int dims, const Rows& rows);

// Reads n tokens from [start, start + n). values: may be null where a block has none of its own.
void gather(const Geometry& geometry, const Table& table, std::int64_t start, std::int64_t n,
            const Rows& keys, const Rows& values);

// Copies [from_start, from_start + n) to [to_start, to_start + n); the two must not overlap in
// memory.
void copy(const Geometry& geometry, const Table& from, std::int64_t from_start, const Table& to,
          std::int64_t to_start, std::int64_t n);

// Reads every byte of the blocks, and returns the xor of their 64-bit words: how fast memory can be
// read, for benchmarks to compare with.
std::uint64_t read_blocks(const Geometry& geometry, const Table& table);

}  // namespace kvdb
