#include <algorithm>
#include <cmath>

#include "../pages/quantize.h"
#include "attend.h"
#include "isa.h"
#include "paged_memory.h"
#include "thread_pool.h"

namespace kvdb {
namespace {

constexpr std::int64_t kInlineRetrieved = 16384;  // of values here and there, in no cache

}  // namespace

void attend_retrieved(const AttendRetrievedCall& call) {
    check_attendable(call.geometry);
    const std::int64_t rows = call.q_heads * call.n;
    if (call.offsets[rows] > 0) check_format(call.geometry, format_of(call.table[0]));
    const int value_dim = call.geometry.value_dim;
    const int group = call.q_heads / call.geometry.kv_heads;
    const std::size_t out_bytes = value_dim * (call.out_dtype == Dtype::float32 ? 4 : 2);
    const RetrievedKernel kernel =
        current_kernels(Operation::gather).retrieved[static_cast<int>(call.geometry.dtype)];
    require_values(call.geometry, call.table, call.offsets, rows, call.n * group, call.ids);
    ThreadPool& pool = ThreadPool::instance();
    const bool small = call.offsets[rows] * value_dim < kInlineRetrieved;
    pool.run(rows, small ? 1 : pool.threads(), [&](std::int64_t row, int) {
        kernel({
            .geometry = call.geometry,
            .table = call.table,
            .kv_head = static_cast<int>(row / call.n) / group,
            .ids = call.ids + call.offsets[row],
            .scores = call.scores + call.offsets[row],
            .count = call.offsets[row + 1] - call.offsets[row],
            .scale = call.scale,
            .state_out = call.state_out + row * value_dim,
            .state_lse = call.state_lse[row],
            .tail_out = call.tail_out ? call.tail_out + row * value_dim : nullptr,
            .tail_lse = call.tail_out ? call.tail_lse[row] : -INFINITY,
            .sink = call.sinks ? call.sinks[row / call.n] : -INFINITY,
            .out = static_cast<std::byte*>(call.out) + row * out_bytes,
            .out_dtype = call.out_dtype,
            .lse = call.lse + row,
        });
    });
}

Share share_of(const float* missed, const float* lse, std::size_t count) {
    Share all{0, 0};
    for (std::size_t i = 0; i < count; ++i) {
        const double log = missed[i];
        double share = log == -INFINITY ? 0 : 1 / (1 + std::exp(lse[i] - log));
        if (!(share <= 1)) share = 1;  // not a number: nothing is known
        all.mean += share / double(count);
        all.largest = std::max(all.largest, share);
    }
    return all;
}

}  // namespace kvdb
