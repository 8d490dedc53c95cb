// Attention of a few rows: the context is read once, in place, and reading takes nearly all the
// time.
#pragma once

#include "decode_step.h"
#include "decode_walk.h"
#include "kernels.h"
#include "rotate.h"

namespace kvdb::kernels {

// Rows go in batches of 4, 2 or 1; the last batch may carry an idle row.
template <class Isa, class T>
class Decode : DecodeWalk<Decode<Isa, T>, Isa, T> {
    using Walk = DecodeWalk<Decode, Isa, T>;
    using Loaded = typename Walk::Loaded;
    using Walk::item_;
    friend Walk;

  public:
    static void run(const AttendItem& item) { Decode(item).run(); }

    static std::size_t scratch_floats(const Geometry& geometry, int heads, std::int64_t rows) {
        return heads * (round_up(rows, 4) * round_up(geometry.head_dim, kLanePadding) +
                        2 * rows * Isa::width) +
               2 * Loaded::scratch_elements(geometry);
    }

  private:
    explicit Decode(const AttendItem& item)
        : Walk(item),
          rows_(static_cast<int>(item.row_end - item.row_begin)),
          stride_(round_up(item.geometry.head_dim, kLanePadding)),
          value_stride_(round_up(item.geometry.value_dim, kLanePadding)),
          query_(reinterpret_cast<float*>(item.scratch)),
          max_(query_ + item.heads * round_up(rows_, 4) * stride_),
          sum_(max_ + item.heads * rows_ * Isa::width),
          gathered_(sum_ + item.heads * rows_ * Isa::width) {}

    void run() {
        start();
        Walk::walk(reinterpret_cast<T*>(gathered_));
        end_sums();
    }

    void attend(const DecodeTile& tile, const Loaded& loaded, const Loaded* next, int head) {
        const DecodeStream<T> ahead(item_.geometry, loaded, next ? *next : loaded);
        const T* const* stream = next ? ahead.groups : nullptr;  // the first batch asks for all
        for (int r = 0, batch; r < rows_; r += batch, stream = nullptr) {
            batch = batch_rows(rows_ - r);
            const DecodeRows rows{query(head, r),       stride_,
                                  values(head, r),      value_stride_,
                                  lanes(max_, head, r), lanes(sum_, head, r),
                                  item_.row_begin + r};
            switch (item_.geometry.symmetric() ? item_.geometry.head_dim : 0) {
                case 64: step<64>(batch, tile, loaded, stream, rows); break;
                case 128: step<128>(batch, tile, loaded, stream, rows); break;
                default: step<0>(batch, tile, loaded, stream, rows); break;
            }
        }
    }

    template <int dim>
    void step(int batch, const DecodeTile& tile, const Loaded& loaded, const T* const* stream,
              const DecodeRows& rows) {
        switch (batch) {
            case 1: return DecodeStep<Isa, T, 1, dim>::run(item_, tile, loaded, stream, rows);
            case 2: return DecodeStep<Isa, T, 2, dim>::run(item_, tile, loaded, stream, rows);
            default: return DecodeStep<Isa, T, 4, dim>::run(item_, tile, loaded, stream, rows);
        }
    }

    void start() {
        clear(query_, item_.heads * round_up(rows_, 4) * stride_, 0.0f);
        clear(max_, item_.heads * rows_ * Isa::width, -__builtin_inff());
        clear(sum_, item_.heads * rows_ * Isa::width, 0.0f);
        for (int head = 0; head < item_.heads; ++head) {
            clear(values(head, 0), round_up(rows_, 4) * value_stride_, 0.0f);
        }
        load_queries(-1);
    }

    // Queries, rotated for the keys of a view.
    void load_queries(std::int32_t view) {
        for (int head = 0; head < item_.heads; ++head) {
            for (int r = 0; r < rows_; ++r) {
                Rotate<Isa, T>::load_query(
                    query(head, r), row_of<const T>(item_.query, item_, head, item_.row_begin + r),
                    item_, view);
            }
        }
    }

    // From lanes to rows.
    void end_sums() {
        for (int head = 0; head < item_.heads; ++head) {
            for (int r = 0, batch; r < rows_; r += batch) {
                batch = batch_rows(rows_ - r);
                const int tokens = Isa::width / batch;
                for (int j = 0; j < batch && r + j < rows_; ++j) {
                    Operand<Isa, T>::order_sums(values(head, r + j), item_.geometry.value_dim);
                    float sum = 0;
                    for (int t = 0; t < tokens; ++t) sum += lanes(sum_, head, r)[j * tokens + t];
                    const std::int64_t row = head * item_.state.rows + r + j;
                    item_.state.sum[row] = sum;
                    item_.state.max[row] = lanes(max_, head, r)[j * tokens];
                }
            }
        }
    }

    static int batch_rows(int left) { return left >= 3 ? 4 : left; }

    static void clear(float* at, std::int64_t count, float value) {
        for (std::int64_t i = 0; i < count; ++i) at[i] = value;
    }

    float* query(int head, int r) const {
        return query_ + (head * round_up(rows_, 4) + r) * stride_;
    }
    float* values(int head, int r) const {
        return item_.state.values + (head * item_.state.rows + r) * value_stride_;
    }
    float* lanes(float* of, int head, int r) const { return of + (head * rows_ + r) * Isa::width; }

    const int rows_;
    const std::int64_t stride_, value_stride_;  // of queries, and of what is added up
    float* const query_;
    float* const max_;
    float* const sum_;
    float* const gathered_;
};

}  // namespace kvdb::kernels
