#include "move.h"

#include <cstring>

#include "isa.h"
#include "span.h"

namespace kvdb {
namespace {

void check_positions(const Geometry& geometry, const Table& table, const Positions& positions,
                     const char* name) {
    const std::int64_t capacity = table.size * geometry.block_size;
    for (std::int64_t i = 0; i < positions.count; ++i) {
        if (positions.at[i] < 0 || positions.at[i] >= capacity) {
            throw std::invalid_argument(std::string(name) + ": positions[" + std::to_string(i) +
                                        "] is " + std::to_string(positions.at[i]) +
                                        ", which does not lie in the table's [0, " +
                                        std::to_string(capacity) + ")");
        }
    }
}

std::byte* row_at(const Geometry& geometry, const Table& table, std::int64_t token, int head,
                  Plane plane) {
    return block_rows(geometry, table, span_in_block(token, 1, geometry.block_size, 0), head,
                      plane);
}

// each(head, plane), in parallel if n tokens are worth it; the tokens of one plane keep their
// order. planes: 1 for keys alone, 2 for values too.
template <class Each>
void for_each_plane(const Geometry& geometry, int planes, std::int64_t n, Each&& each) {
    for_each(planes * geometry.kv_heads, payload_bytes(geometry, n), [&](std::int64_t index) {
        each(static_cast<int>(index / planes), static_cast<Plane>(index % planes));
    });
}

}  // namespace

void place(const Geometry& geometry, const Table& from, std::int64_t from_start, const Table& to,
           std::int64_t to_start, std::int64_t n, const Rotation& rotation) {
    check_range(geometry, from, from_start, n, "place: source");
    check_range(geometry, to, to_start, n, "place: target");
    const RotateKernel rotate = current_kernels().rotate[static_cast<int>(geometry.dtype)];
    const auto key_bytes = static_cast<std::int64_t>(geometry.key_row_bytes());
    for_each_piece(geometry, from_start, to_start, n, [&](const Span& source, const Span& into) {
        for (int head = 0; head < geometry.kv_heads; ++head) {
            rotate({
                .to = block_rows(geometry, to, into, head, Plane::key),
                .from = block_rows(geometry, from, source, head, Plane::key),
                .to_stride = key_bytes,
                .from_stride = key_bytes,
                .rows = source.tokens,
                .head_dim = geometry.head_dim,
                .rotation = rotation,
                .direction = 1,
                .to_float = false,
            });
            if (!geometry.own_values()) continue;
            std::memcpy(block_rows(geometry, to, into, head, Plane::value),
                        block_rows(geometry, from, source, head, Plane::value),
                        geometry.value_row_bytes() * source.tokens);
        }
    });
}

void scatter(const Geometry& geometry, const Table& from, std::int64_t from_start, const Table& to,
             const Positions& positions) {
    check_range(geometry, from, from_start, positions.count, "scatter: source");
    check_positions(geometry, to, positions, "scatter");
    const auto planes = static_cast<int>(planes_of(geometry).size());
    for_each_plane(geometry, planes, positions.count, [&](int head, Plane plane) {
        for (std::int64_t i = 0; i < positions.count; ++i) {
            std::memcpy(row_at(geometry, to, positions.at[i], head, plane),
                        row_at(geometry, from, from_start + i, head, plane),
                        row_bytes(geometry, plane));
        }
    });
}

void gather_at(const Geometry& geometry, const Table& table, const Positions& positions,
               const Rows& keys, const Rows& values) {
    check_positions(geometry, table, positions, "gather_at");
    for_each_plane(geometry, values.data ? 2 : 1, positions.count, [&](int head, Plane plane) {
        const Rows& rows = plane == Plane::key ? keys : values;
        for (std::int64_t i = 0; i < positions.count; ++i) {
            std::memcpy(array_rows(geometry, rows, i, head),
                        row_at(geometry, table, positions.at[i], head, plane),
                        row_bytes(geometry, plane));
        }
    });
}

void rotate_back(const Geometry& geometry, int heads, std::int64_t n, const Rows& rows,
                 const Rotation& rotation, const Rows& out, bool to_float) {
    const RotateKernel rotate = current_kernels().rotate[static_cast<int>(geometry.dtype)];
    const auto from_bytes = static_cast<std::int64_t>(geometry.element_bytes());
    const std::int64_t to_bytes = to_float ? 4 : from_bytes;
    for_each(heads, geometry.key_row_bytes() * heads * n, [&](std::int64_t head) {
        rotate({
            .to = static_cast<std::byte*>(out.data) + head * out.head_stride * to_bytes,
            .from = static_cast<const std::byte*>(rows.data) + head * rows.head_stride * from_bytes,
            .to_stride = out.token_stride * to_bytes,
            .from_stride = rows.token_stride * from_bytes,
            .rows = n,
            .head_dim = geometry.head_dim,
            .rotation = rotation,
            .direction = -1,
            .to_float = to_float,
        });
    });
}

}  // namespace kvdb
