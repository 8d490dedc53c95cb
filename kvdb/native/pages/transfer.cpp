#include "transfer.h"

#include <atomic>
#include <cstring>
#include <stdexcept>

#include "isa.h"
#include "span.h"

namespace kvdb {
namespace {

constexpr std::size_t kStreamBytes = 8 << 20;  // more than this leaves the caches anyway

// Rows that are contiguous on both sides are copied as one long row.
CopyItem join_rows(CopyItem item) {
    const auto bytes = static_cast<std::int64_t>(item.row_bytes);
    if (item.to_stride == bytes && item.from_stride == bytes) {
        item.row_bytes *= item.rows;
        item.rows = 1;
    }
    return item;
}

bool is_finite(const std::byte* element, Dtype dtype) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, element,
                dtype == Dtype::float32 ? 4 : 2);  // little-endian, as all we run on
    const std::uint32_t infinity = dtype == Dtype::float32   ? 0x7f800000
                                   : dtype == Dtype::float16 ? 0x7c00
                                                             : 0x7f80;
    return (bits & infinity) != infinity;
}

// The kernels only tell whether there is such an element; this finds its token.
NotFinite find_not_finite(const Geometry& geometry, std::int64_t n, const Rows& keys,
                          const Rows& values) {
    for (std::int64_t token = 0; token < n; ++token) {
        for (const Plane plane : planes_of(geometry)) {
            const Rows& rows = plane == Plane::key ? keys : values;
            for (int head = 0; head < geometry.kv_heads; ++head) {
                const std::byte* row = array_rows(geometry, rows, token, head);
                const int dims = plane == Plane::key ? geometry.head_dim : geometry.value_dim;
                for (int i = 0; i < dims; ++i, row += geometry.element_bytes()) {
                    if (!is_finite(row, geometry.dtype)) return {plane, head, token};
                }
            }
        }
    }
    throw std::logic_error("append: a kernel saw a value that is not finite where there is none");
}

// Without the sign, bits have the order of the absolute values, so the largest decides for all
// elements.
template <class T>
bool rows_finite(const Geometry& geometry, int heads, std::int64_t n, int dims, const Rows& rows,
                 T infinity) {
    T largest = 0;
    for (int head = 0; head < heads; ++head) {
        for (std::int64_t token = 0; token < n; ++token) {
            const auto* row = reinterpret_cast<const T*>(array_rows(geometry, rows, token, head));
            for (int i = 0; i < dims; ++i) {
                const auto bits =
                    static_cast<T>(row[i] & static_cast<T>(static_cast<T>(~T{0}) >> 1));
                largest = bits > largest ? bits : largest;
            }
        }
    }
    return largest < infinity;
}

}  // namespace

bool finite(const Geometry& geometry, int heads, std::int64_t n, int dims, const Rows& rows) {
    switch (geometry.dtype) {
        case Dtype::float32:
            return rows_finite<std::uint32_t>(geometry, heads, n, dims, rows, 0x7f800000);
        case Dtype::float16:
            return rows_finite<std::uint16_t>(geometry, heads, n, dims, rows, 0x7c00);
        case Dtype::bfloat16: break;
    }
    return rows_finite<std::uint16_t>(geometry, heads, n, dims, rows, 0x7f80);
}

std::optional<NotFinite> append(const Geometry& geometry, const Table& table, std::int64_t start,
                                std::int64_t n, const Rows& keys, const Rows& values) {
    check_range(geometry, table, start, n, "append");
    const CopyKernel copy_finite = current_kernels().copy_finite[static_cast<int>(geometry.dtype)];
    const std::size_t bytes = payload_bytes(geometry, n);
    const auto token_bytes = static_cast<std::int64_t>(geometry.element_bytes());
    std::atomic<bool> finite{true};
    const auto append_block = [&](std::int64_t index) {
        const Span span = span_in_block(start, n, geometry.block_size, index);
        for (const Plane plane : planes_of(geometry)) {
            const Rows& rows = plane == Plane::key ? keys : values;
            for (int head = 0; head < geometry.kv_heads; ++head) {
                const bool passed = copy_finite(join_rows({
                    .to = block_rows(geometry, table, span, head, plane),
                    .from = array_rows(geometry, rows, span.offset, head),
                    .to_stride = static_cast<std::int64_t>(row_bytes(geometry, plane)),
                    .from_stride = rows.token_stride * token_bytes,
                    .rows = span.tokens,
                    .row_bytes = row_bytes(geometry, plane),
                    .stream = bytes > kStreamBytes,
                }));
                if (!passed) finite.store(false, std::memory_order_relaxed);
            }
        }
    };
    for_each(blocks_touched(start, n, geometry.block_size), bytes, append_block);
    if (finite) return std::nullopt;
    return find_not_finite(geometry, n, keys, values);
}

void gather(const Geometry& geometry, const Table& table, std::int64_t start, std::int64_t n,
            const Rows& keys, const Rows& values) {
    check_range(geometry, table, start, n, "gather");
    const CopyKernel copy_rows = current_kernels().copy;
    const std::size_t bytes = payload_bytes(geometry, n);
    const auto token_bytes = static_cast<std::int64_t>(geometry.element_bytes());
    for_each(blocks_touched(start, n, geometry.block_size), bytes, [&](std::int64_t index) {
        const Span span = span_in_block(start, n, geometry.block_size, index);
        for (const Plane plane : {Plane::key, Plane::value}) {
            if (plane == Plane::value && !values.data) continue;
            const Rows& rows = plane == Plane::key ? keys : values;
            for (int head = 0; head < geometry.kv_heads; ++head) {
                copy_rows(join_rows({
                    .to = array_rows(geometry, rows, span.offset, head),
                    .from = block_rows(geometry, table, span, head, plane),
                    .to_stride = rows.token_stride * token_bytes,
                    .from_stride = static_cast<std::int64_t>(plane == Plane::key
                                                                 ? geometry.key_row_bytes()
                                                                 : geometry.value_stride_bytes()),
                    .rows = span.tokens,
                    .row_bytes = row_bytes(geometry, plane),
                    .stream = bytes > kStreamBytes,
                }));
            }
        }
    });
}

void copy(const Geometry& geometry, const Table& from, std::int64_t from_start, const Table& to,
          std::int64_t to_start, std::int64_t n) {
    check_range(geometry, from, from_start, n, "copy: source");
    check_range(geometry, to, to_start, n, "copy: destination");
    const CopyKernel copy_rows = current_kernels().copy;
    const bool stream = payload_bytes(geometry, n) > kStreamBytes;
    for_each_piece(geometry, from_start, to_start, n, [&](const Span& source, const Span& into) {
        for (const Plane plane : planes_of(geometry)) {
            for (int head = 0; head < geometry.kv_heads; ++head) {
                copy_rows({
                    .to = block_rows(geometry, to, into, head, plane),
                    .from = block_rows(geometry, from, source, head, plane),
                    .to_stride = 0,
                    .from_stride = 0,
                    .rows = 1,
                    .row_bytes = row_bytes(geometry, plane) * source.tokens,
                    .stream = stream,
                });
            }
        }
    });
}

std::uint64_t read_blocks(const Geometry& geometry, const Table& table) {
    const auto read = current_kernels().read;
    std::atomic<std::uint64_t> sum{0};
    for_each(table.size, geometry.block_bytes() * table.size, [&](std::int64_t index) {
        const auto* block = reinterpret_cast<const std::byte*>(table.blocks[index]);
        sum.fetch_xor(read(block, geometry.block_bytes()), std::memory_order_relaxed);
    });
    return sum;
}

}  // namespace kvdb
