// Ranges of tokens, cut at the borders of blocks, for the drivers that move them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "thread_pool.h"
#include "transfer.h"

namespace kvdb {

inline constexpr std::size_t kParallelBytes = 1 << 18;  // less is copied before a thread wakes

struct Span {
    std::int64_t block, slot;
    std::int64_t offset;  // tokens since the start of the range
    std::int64_t tokens;
};

// The part of [start, start + n) in the index-th block that the range touches.
inline Span span_in_block(std::int64_t start, std::int64_t n, int block_size, std::int64_t index) {
    const std::int64_t block = start / block_size + index;
    const std::int64_t begin = std::max(start, block * block_size);
    const std::int64_t end = std::min(start + n, (block + 1) * block_size);
    return {block, begin - block * block_size, begin - start, end - begin};
}

inline std::int64_t blocks_touched(std::int64_t start, std::int64_t n, int block_size) {
    return n == 0 ? 0 : (start + n - 1) / block_size - start / block_size + 1;
}

inline void check_range(const Geometry& geometry, const Table& table, std::int64_t start,
                        std::int64_t n, const char* name) {
    const std::int64_t capacity = table.size * geometry.block_size;
    if (start < 0 || n < 0 || start > capacity - n) {
        throw std::invalid_argument(std::string(name) + ": " + std::to_string(n) + " tokens from " +
                                    std::to_string(start) + " on do not lie in the table's [0, " +
                                    std::to_string(capacity) + ")");
    }
}

inline std::byte* block_rows(const Geometry& geometry, const Table& table, const Span& span,
                             int head, Plane plane) {
    return reinterpret_cast<std::byte*>(table.blocks[span.block]) +
           (plane == Plane::key ? geometry.key_at(head, span.slot)
                                : geometry.value_at(head, span.slot));
}

inline std::byte* array_rows(const Geometry& geometry, const Rows& rows, std::int64_t offset,
                             int head) {
    return static_cast<std::byte*>(rows.data) +
           (head * rows.head_stride + offset * rows.token_stride) *
               static_cast<std::int64_t>(geometry.element_bytes());
}

// The bytes of a row of a plane, and from one to the next: what is stored of keys, or of values.
inline std::size_t row_bytes(const Geometry& geometry, Plane plane) {
    return plane == Plane::key ? geometry.key_row_bytes() : geometry.value_row_bytes();
}

// The planes that a block has.
inline std::span<const Plane> planes_of(const Geometry& geometry) {
    static constexpr Plane both[] = {Plane::key, Plane::value};
    return {both, geometry.own_values() ? std::size_t{2} : std::size_t{1}};
}

// each(index) for [0, items), in parallel if `bytes` are worth it.
template <class Each>
inline void for_each(std::int64_t items, std::size_t bytes, Each&& each) {
    ThreadPool& pool = ThreadPool::instance();
    const int threads = bytes < kParallelBytes ? 1 : pool.threads();
    pool.run(items, threads, [&](std::int64_t index, int) { each(index); });
}

inline std::size_t payload_bytes(const Geometry& geometry, std::int64_t n) {
    return geometry.token_bytes() * n;
}

// each(source, into) for the parts of [from_start, from_start + n) that lie in one block of the
// source and in one block of the destination, [to_start, to_start + n). The parts of one
// destination block run in order.
template <class Each>
void for_each_piece(const Geometry& geometry, std::int64_t from_start, std::int64_t to_start,
                    std::int64_t n, Each&& each) {
    const int size = geometry.block_size;
    for_each(blocks_touched(to_start, n, size), payload_bytes(geometry, n), [&](std::int64_t i) {
        const Span target = span_in_block(to_start, n, size, i);
        const std::int64_t begin = from_start + target.offset;
        const std::int64_t pieces = blocks_touched(begin, target.tokens, size);
        for (std::int64_t piece = 0; piece < pieces; ++piece) {
            const Span source = span_in_block(begin, target.tokens, size, piece);
            Span into = target;
            into.slot += source.offset;
            each(source, into);
        }
    });
}

}  // namespace kvdb
