// Attention over quantized blocks, where they lie: both products are of bytes.
//
// A query row and the weights of a tile become whole numbers too. Beside codes of eight bits they
// have 16, in two bytes, so that they add next to nothing to the error; beside four, 8.
#pragma once

#include "kernels.h"
#include "quantized_step.h"
#include "rotate.h"
#include "simd/hadamard.h"

namespace kvdb::kernels {

template <class Isa, int key_bits, int value_bits>
class DecodeQuantized {
    template <int R>
    using Step = QuantizedStep<Isa, key_bits, value_bits, R>;
    static constexpr int parts = Step<4>::query_parts;

  public:
    static void run(const AttendItem& item) { DecodeQuantized(item).run(); }

    static std::size_t scratch_bytes(const Geometry& geometry, int heads, std::int64_t rows) {
        return sizeof(float) * heads * round_up(rows, 4) * row_floats(geometry.head_dim);
    }

  private:
    explicit DecodeQuantized(const AttendItem& item)
        : item_(item),
          rows_(static_cast<int>(item.row_end - item.row_begin)),
          stride_(round_up(item.geometry.head_dim, kLanePadding)),
          layout_(item.geometry, key_bits, value_bits),
          scratch_(reinterpret_cast<float*>(item.scratch)) {}

    // A rotated query, its bytes, the step and the correction of its sums.
    static std::int64_t row_floats(int head_dim) {
        const std::int64_t stride = round_up(head_dim, kLanePadding);
        return stride + parts * stride / 4 + 16;
    }

    void run() {
        start();
        load_queries(-1);
        const std::int64_t last_seen = visible(item_, item_.row_end - 1);
        const std::int64_t end = item_.token_end < last_seen ? item_.token_end : last_seen;
        const Placement* placement = item_.run.placement;
        std::int64_t token = item_.token_begin;
        std::int32_t loaded = -1;
        for (std::int64_t b = item_.block; b < item_.run.blocks && token < end; ++b) {
            const std::int64_t left = end - token;
            const int count = item_.run.counts[b] < left ? item_.run.counts[b] : int(left);
            const bool placed = placement && b < placement->blocks;
            const std::int32_t view = placed ? placement->view[b] : -1;
            if (view != loaded) load_queries(loaded = view);
            attend_block(b, token, count);
            token += item_.run.counts[b];
        }
        for (int head = 0; head < item_.heads; ++head) {
            for (int r = 0; r < rows_; ++r) {
                simd::Hadamard<Isa>::rotate_back(values(head, r), item_.geometry.head_dim);
            }
        }
    }

    // Block after block, head after head: memory is read in the order in which it lies.
    void attend_block(std::int64_t block, std::int64_t token, int count) {
        for (int head = 0; head < item_.heads; ++head) {
            const std::byte* at = head_of(block, head);
            const std::byte* next =
                head + 1 < item_.heads ? at + layout_.bytes : head_of(block + 1, 0);
            for (int slot = 0; slot < count; slot += kQuantizedTile) {
                QuantizedTile tile{
                    .head = at,
                    .ahead = (next ? next : at) - at,
                    .begin = token + slot,
                    .slot = slot,
                    .count = count - slot < kQuantizedTile ? count - slot : kQuantizedTile,
                    .hidden = hidden(block, slot),
                };
                for (int r = 0, batch; r < rows_; r += batch, tile.ahead = 0) {
                    batch = rows_ - r >= 3 ? 4 : rows_ - r;
                    const QuantizedRows rows = rows_at(head, r);
                    switch (batch) {
                        case 1: Step<1>::run(item_, layout_, tile, rows); break;
                        case 2: Step<2>::run(item_, layout_, tile, rows); break;
                        default: Step<4>::run(item_, layout_, tile, rows); break;
                    }
                }
            }
        }
    }

    const std::byte* head_of(std::int64_t block, int head) const {
        if (block >= item_.run.blocks) return nullptr;
        return reinterpret_cast<const std::byte*>(item_.run.table[block]) +
               (item_.kv_head + head) * layout_.bytes;
    }

    // The bits of a tile's tokens that nobody sees.
    std::uint64_t hidden(std::int64_t block, int slot) const {
        const Placement* placement = item_.run.placement;
        if (!placement || !placement->hidden || block >= placement->blocks) return 0;
        return placement->hidden[block * placement->words + slot / 64];
    }

    void start() {
        const std::int64_t all = round_up(rows_, 4);
        for (std::int64_t i = 0; i < item_.heads * all * row_floats(item_.geometry.head_dim); ++i) {
            scratch_[i] = 0;
        }
        for (int head = 0; head < item_.heads; ++head) {
            for (std::int64_t i = 0; i < all * stride_; ++i) values(head, 0)[i] = 0;
            for (std::int64_t r = 0; r < all; ++r) {
                item_.state.max[head * item_.state.rows + r] = -__builtin_inff();
                item_.state.sum[head * item_.state.rows + r] = 0;
            }
        }
    }

    // Queries, turned back for the keys of a view, then rotated as the codes are, and rounded.
    void load_queries(std::int32_t view) {
        for (int head = 0; head < item_.heads; ++head) {
            for (int r = 0; r < rows_; ++r) {
                float* query = row(head, r);
                switch (item_.geometry.dtype) {
                    case Dtype::float32: load_query<float>(query, head, r, view); break;
                    case Dtype::float16: load_query<Float16>(query, head, r, view); break;
                    case Dtype::bfloat16: load_query<BFloat16>(query, head, r, view); break;
                }
                simd::Hadamard<Isa>::rotate(query, item_.geometry.head_dim);
                round_query(query);
            }
        }
    }

    template <class T>
    void load_query(float* query, int head, int r, std::int32_t view) const {
        Rotate<Isa, T>::load_floats(
            query, row_of<const T>(item_.query, item_, head, item_.row_begin + r), item_, view);
    }

    void round_query(float* query) const {
        const int head_dim = item_.geometry.head_dim;
        float largest = 0;
        for (int i = 0; i < head_dim; ++i) {
            const float size = __builtin_fabsf(query[i]);
            if (size > largest) largest = size;
        }
        constexpr int most = parts == 2 ? 127 * 256 : 127;
        const float step = largest / most;
        const float inverse = largest > 0 ? most / largest : 0;
        auto* bytes = reinterpret_cast<std::int8_t*>(query + stride_);
        std::int32_t sum = 0;
        for (int i = 0; i < head_dim; ++i) {
            float scaled = query[i] * inverse;
            if (!(__builtin_fabsf(scaled) < most + 1))
                scaled = 0;  // no number, or too small for one
            const int whole = static_cast<int>(scaled + (scaled < 0 ? -0.5f : 0.5f));
            const int high = (whole + 128) >> 8;
            if constexpr (parts == 2) bytes[stride_ + i] = static_cast<std::int8_t>(high);
            bytes[i] = static_cast<std::int8_t>(parts == 2 ? whole - 256 * high : whole);
            sum += whole;
        }
        float* last = query + stride_ + parts * stride_ / 4;
        last[0] = step;
        const std::int32_t correction = -(sum * ((1 << key_bits) - 1)) / 2;
        __builtin_memcpy(last + 1, &correction, sizeof correction);
    }

    QuantizedRows rows_at(int head, int r) const {
        const std::int64_t first = head * item_.state.rows + r;
        return {.query = row(head, r),
                .query_stride = row_floats(item_.geometry.head_dim),
                .values = values(head, r),
                .stride = stride_,
                .max = item_.state.max + first,
                .sum = item_.state.sum + first,
                .first_row = item_.row_begin + r};
    }

    float* row(int head, int r) const {
        return scratch_ + (head * round_up(rows_, 4) + r) * row_floats(item_.geometry.head_dim);
    }
    float* values(int head, int r) const {
        return item_.state.values + (head * item_.state.rows + r) * stride_;
    }

    const AttendItem& item_;
    const int rows_;
    const std::int64_t stride_;
    const QuantizedHead layout_;
    float* const scratch_;
};

}  // namespace kvdb::kernels
