// Attention over a run whose blocks are of several formats: a part for each format, and the merge
// of their states.
#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <vector>

#include "attend.h"
#include "isa.h"
#include "thread_pool.h"

namespace kvdb {
namespace {

// How many tokens of the run each query sees, but for those before its window.
std::vector<std::int64_t> limits_of(const AttendCall& call) {
    if (call.ends) return {call.ends, call.ends + call.n};
    std::int64_t tokens = 0;
    for (std::int64_t b = 0; b < call.run.blocks; ++b) tokens += call.run.counts[b];
    std::vector<std::int64_t> limits(call.n, tokens);
    for (std::int64_t i = 0; call.causal && i < call.n; ++i) limits[i] = tokens - call.n + 1 + i;
    return limits;
}

// The blocks of one format of a call's run, in their order, as a call of its own.
class Part {
  public:
    Part(const AttendCall& call, BlockFormat format) : call_(call), placement_{} {
        call_.format = format;
        const Run& run = call.run;
        const bool limited = call.causal != 0 || call.ends;
        const std::vector<std::int64_t> limits =
            limited ? limits_of(call) : std::vector<std::int64_t>{};
        ends_.assign(limits.size(), 0);
        begins_.assign(call.begins ? call.n : 0, 0);
        std::int64_t token = 0;
        for (std::int64_t b = 0; b < run.blocks; token += run.counts[b++]) {
            if (format_of(run.table[b]) != format) continue;
            table_.push_back(run.table[b] & ~kFormatMask);
            counts_.push_back(run.counts[b]);
            if (run.placement) add_placed(*run.placement, b);
            for (std::size_t i = 0; i < limits.size(); ++i) {
                ends_[i] += std::clamp<std::int64_t>(limits[i] - token, 0, run.counts[b]);
            }
            for (std::size_t i = 0; i < begins_.size(); ++i) {
                begins_[i] += std::clamp<std::int64_t>(call.begins[i] - token, 0, run.counts[b]);
            }
        }
        call_.causal = 0;
        call_.ends = limited ? ends_.data() : nullptr;
        call_.begins = call.begins ? begins_.data() : nullptr;
        call_.run = {table_.data(), counts_.data(), static_cast<std::int64_t>(table_.size())};
        if (run.placement) {
            placement_ = *run.placement;
            placement_.view = views_.data();
            placement_.blocks = call_.run.blocks;
            placement_.hidden = run.placement->hidden ? hidden_.data() : nullptr;
            call_.run.placement = &placement_;
        }
    }
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;

    void attend() const { attend_uniform(call_); }

    // The same without sinks, with a state of its own: out float32 [q_heads, n, value_dim], lse and
    // top.
    void attend_apart() {
        const std::int64_t rows = call_.q_heads * call_.n;
        const int value_dim = call_.geometry.value_dim;
        out.resize(rows * value_dim);
        lse.resize(rows);
        top.resize(rows);
        call_.out = {out.data(), call_.n * value_dim, value_dim};
        call_.out_dtype = Dtype::float32;
        call_.lse = lse.data();
        call_.top = top.data();
        call_.sinks = nullptr;
        attend_uniform(call_);
    }

    std::vector<float> out, lse, top;

  private:
    void add_placed(const Placement& placement, std::int64_t block) {
        const bool placed = block < placement.blocks;
        views_.push_back(placed ? placement.view[block] : -1);
        if (!placement.hidden) return;
        for (int word = 0; word < placement.words; ++word) {
            const std::int64_t at = block * placement.words + word;
            hidden_.push_back(placed ? placement.hidden[at] : 0);
        }
    }

    AttendCall call_;
    Placement placement_;
    std::vector<std::uint64_t> table_, hidden_;
    std::vector<std::int32_t> counts_, views_;
    std::vector<std::int64_t> ends_, begins_;
};

// Merges the states of two parts row by row into the call's output.
void merge(const AttendCall& call, const Part& first, const Part* second) {
    const int value_dim = call.geometry.value_dim;
    const int group = call.q_heads / call.geometry.kv_heads;
    const std::int64_t element = call.out_dtype == Dtype::float32 ? 4 : 2;
    const RetrievedKernel kernel =
        current_kernels(Operation::gather).retrieved[static_cast<int>(call.geometry.dtype)];
    const std::int64_t begin = std::int64_t{call.kv_begin} * group * call.n;
    const std::int64_t end = std::int64_t{call.kv_end} * group * call.n;
    for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t at =
            row / call.n * call.out.head_stride + row % call.n * call.out.token_stride;
        float lse;
        kernel({.geometry = call.geometry,
                .table = nullptr,
                .kv_head = 0,
                .ids = nullptr,
                .scores = nullptr,
                .count = 0,
                .scale = call.scale,
                .state_out = first.out.data() + row * value_dim,
                .state_lse = first.lse[row],
                .tail_out = second ? second->out.data() + row * value_dim : nullptr,
                .tail_lse = second ? second->lse[row] : -INFINITY,
                .sink = call.sinks ? call.sinks[row / call.n] : -INFINITY,
                .out = static_cast<std::byte*>(call.out.data) + at * element,
                .out_dtype = call.out_dtype,
                .lse = &lse});
        if (call.lse) call.lse[row] = lse;
        if (call.top) {
            call.top[row] = second ? std::max(first.top[row], second->top[row]) : first.top[row];
        }
    }
}

// Adds a part's state to another's.
void merge_into(const AttendCall& call, Part& into, const Part& other) {
    AttendCall merged = call;
    const int value_dim = call.geometry.value_dim;
    merged.out = {into.out.data(), call.n * value_dim, value_dim};
    merged.out_dtype = Dtype::float32;
    merged.lse = into.lse.data();
    merged.top = into.top.data();
    merged.sinks = nullptr;
    merge(merged, into, &other);
}

void attend_all(const AttendCall& call) {
    const Run& run = call.run;
    bool present[kQuantizedFormats + 1] = {};
    for (std::int64_t b = 0; b < run.blocks; ++b) {
        const std::uint64_t format = run.table[b] & kFormatMask;
        if (format > kQuantizedFormats) {
            throw std::invalid_argument("table[" + std::to_string(b) + "] is " +
                                        std::to_string(run.table[b]) +
                                        "; expected the address of a block, and its format");
        }
        present[format] = true;
    }
    if (!present[1] && !present[2] && !present[3]) return attend_uniform(call);
    check_attended(call);
    std::vector<std::unique_ptr<Part>> parts;
    for (int format = 0; format <= kQuantizedFormats; ++format) {
        if (!present[format]) continue;
        parts.push_back(std::make_unique<Part>(call, static_cast<BlockFormat>(format)));
    }
    if (parts.size() == 1) return parts[0]->attend();
    for (const auto& part : parts) part->attend_apart();
    for (std::size_t i = 2; i < parts.size(); ++i) merge_into(call, *parts[1], *parts[i]);
    merge(call, *parts[0], parts[1].get());
}

}  // namespace

void attend(const AttendCall& call) {
    if (call.window == 0) return attend_all(call);
    check_attended(call);
    std::vector<std::int64_t> begins = limits_of(call);
    for (std::int64_t& begin : begins) begin = std::max<std::int64_t>(begin - call.window, 0);
    AttendCall limited = call;
    limited.begins = begins.data();
    attend_all(limited);
}

}  // namespace kvdb
