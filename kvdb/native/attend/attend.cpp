// size: every way in which blocks are attended is checked and shared out here.
#include "attend.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "../pages/quantize.h"
#include "isa.h"
#include "paged_memory.h"
#include "splits.h"
#include "thread_pool.h"
#include "usable_cpus.h"
#include "workspace.h"

namespace kvdb {
namespace {

constexpr std::int64_t kPrefillRows = 768;       // their state and queries stay in the L2 cache
constexpr std::int64_t kInlineElements = 65536;  // of K and V: less is read before a thread wakes
// Of K and V: with another thread, less is not read sooner than who sleeps meanwhile takes to wake.
constexpr std::int64_t kShortElements = 1572864;
constexpr std::int64_t kInlineMerged = 262144;  // of states: less is merged before a thread wakes

thread_local bool leaves_processor = false;

// How a call is cut into items: group of KV heads x tile of rows x split of the tokens.
struct Plan {
    bool prefill;
    int threads;
    int group;          // query heads for each KV head
    int kv_heads;       // that are attended
    int heads;          // KV heads of an item: decode takes all, prefill one
    std::int64_t rows;  // of each KV head
    std::int64_t tile_rows, row_tiles;
    std::int64_t tokens;
    std::vector<Split> splits;  // and one past the end

    std::int64_t outputs() const { return kv_heads / heads * row_tiles; }
    std::int64_t split_count() const { return static_cast<std::int64_t>(splits.size()) - 1; }
    std::int64_t padded_rows() const {
        return prefill ? round_up(tile_rows, kPrefillRowPadding) : kDecodeRowsMax;
    }
};

void check_causal(const AttendCall& call, std::int64_t tokens) {
    if (call.causal != 0 && call.causal != call.n) {
        throw std::invalid_argument("causal is " + std::to_string(call.causal) +
                                    "; expected 0 or the number of queries, " +
                                    std::to_string(call.n));
    }
    if (call.causal > tokens) {
        throw std::invalid_argument("causal is " + std::to_string(call.causal) +
                                    ", more than the run's " + std::to_string(tokens) + " tokens");
    }
}

void check_ends(const AttendCall& call, std::int64_t tokens) {
    if (!call.ends || call.n == 0) return;
    if (call.causal != 0) throw std::invalid_argument("ends are given, and causal is not 0");
    const std::int64_t first = call.ends[0], last = call.ends[call.n - 1];
    if (first < 0 || last > tokens || !std::is_sorted(call.ends, call.ends + call.n)) {
        throw std::invalid_argument("ends run from " + std::to_string(first) + " to " +
                                    std::to_string(last) +
                                    "; expected them to rise, from 0 to the run's " +
                                    std::to_string(tokens) + " tokens at most");
    }
}

// Of so many tokens of each of some KV heads: the numbers that attention multiplies.
std::int64_t elements_of(const Geometry& geometry, std::int64_t tokens, std::int64_t kv_heads) {
    return tokens * kv_heads * (geometry.head_dim + geometry.value_dim);
}

int threads_for(std::int64_t elements) {
    if (elements < kInlineElements) return 1;
    const int threads = ThreadPool::threads();
    const bool leaves = leaves_processor && elements <= kShortElements;
    return leaves ? std::min(threads, std::max(1, usable_cpus() - 1)) : threads;
}

Plan make_plan(const AttendCall& call) {
    const Geometry& geometry = call.geometry;
    Plan plan{};
    plan.tokens = count_tokens(geometry, call.run);
    plan.group = call.q_heads / geometry.kv_heads;
    plan.rows = plan.group * call.n;
    plan.prefill = plan.rows > kDecodeRowsMax && call.format == BlockFormat::raw;
    plan.kv_heads = call.kv_end - call.kv_begin;
    plan.heads = plan.prefill ? 1 : plan.kv_heads;
    const std::int64_t rows_max = plan.prefill ? kPrefillRows : kDecodeRowsMax;
    plan.row_tiles = (plan.rows + rows_max - 1) / rows_max;
    plan.tile_rows = (plan.rows + plan.row_tiles - 1) / plan.row_tiles;

    const Split from =
        call.begins ? skip_unseen(call.run, {0, 0}, call.run.blocks, call.begins[0]) : Split{0, 0};
    const std::int64_t seen = plan.tokens - from.token;
    const std::int64_t passes = 1 + plan.rows / kDecodeRowsMax;
    plan.threads = threads_for(passes * elements_of(geometry, seen, plan.kv_heads));
    if (call.threads_max > 0) plan.threads = std::min(plan.threads, call.threads_max);
    std::int64_t parts = 1;
    if (plan.threads > 1) {
        const std::int64_t outputs = plan.outputs();
        const std::int64_t wanted = plan.threads * kItemsPerThread;
        parts = std::clamp<std::int64_t>((wanted + outputs - 1) / outputs, 1,
                                         1 + seen / kSplitTokensMin);
    }
    plan.splits = split_tokens(call.run, from, plan.tokens, parts);
    return plan;
}

// One call: its plan, and its memory in the caller's workspace.
class Attention {
  public:
    explicit Attention(const AttendCall& call)
        : call_(call),
          plan_(make_plan(call)),
          kernels_(current_kernels(plan_.prefill ? Operation::prefill : Operation::decode)) {}

    void run() {
        ThreadPool& pool = ThreadPool::instance();
        const std::int64_t splits = plan_.split_count();
        const std::int64_t outputs = plan_.outputs();
        if (splits == 1) {
            reserve(plan_.threads);
            pool.run(outputs, plan_.threads, [&](std::int64_t output, int slot) {
                attend_item(output, 0, slot, slot);
                finish(output, slot, 0, plan_.heads);
            });
        } else {
            reserve(outputs * splits);
            pool.run(outputs * splits, plan_.threads, [&](std::int64_t index, int slot) {
                attend_item(index / splits, index % splits, slot, index);
            });
            const bool inlined = splits * state_rows_ * row_floats_ < kInlineMerged;
            const int threads = inlined ? 1 : plan_.threads;
            // A thread for each KV head, or, where an item has but one, for some of its rows.
            const std::int64_t pieces = plan_.prefill ? threads : 1;
            pool.run(outputs * plan_.heads * pieces, threads, [&](std::int64_t item, int) {
                const std::int64_t output = item / plan_.heads / pieces;
                const int head = static_cast<int>(item / pieces % plan_.heads);
                finish(output, output * splits, head, 1, item % pieces, pieces);
            });
        }
    }

  private:
    // Scratch for each thread, then `states` states: all values, all maxima, all sums.
    void reserve(std::int64_t states) {
        scratch_bytes_ = round_up(scratch_bytes(), 64);
        state_rows_ = plan_.heads * plan_.padded_rows();
        row_floats_ = round_up(call_.geometry.value_dim, kLanePadding);
        const std::size_t floats = states * state_rows_ * (row_floats_ + 2);
        scratch_ = Workspace::of_this_thread().reserve(scratch_bytes_ * plan_.threads +
                                                       floats * sizeof(float));
        values_ = reinterpret_cast<float*>(scratch_ + scratch_bytes_ * plan_.threads);
        max_ = values_ + states * state_rows_ * row_floats_;
        sum_ = max_ + states * state_rows_;
    }

    std::size_t scratch_bytes() const {
        if (plan_.prefill) return kernels_.prefill_scratch_bytes(call_.geometry, plan_.tile_rows);
        const auto bytes = call_.format == BlockFormat::raw ? kernels_.decode_scratch_bytes
                                                            : kernels_.quantized_scratch_bytes;
        return bytes(call_.geometry, plan_.heads, plan_.tile_rows);
    }

    AttendKernel kernel() const {
        const int format = static_cast<int>(call_.format);
        if (format > 0) return kernels_.decode_quantized[format - 1];
        return (plan_.prefill ? kernels_.prefill
                              : kernels_.decode)[static_cast<int>(call_.geometry.dtype)];
    }

    // The rows of a state from one of its KV heads on.
    State state(std::int64_t index, int head = 0) const {
        const std::int64_t row = index * state_rows_ + head * plan_.padded_rows();
        return {values_ + row * row_floats_, max_ + row, sum_ + row, plan_.padded_rows()};
    }

    int first_head(std::int64_t output) const {
        return call_.kv_begin + static_cast<int>(output / plan_.row_tiles) * plan_.heads;
    }
    std::int64_t first_row(std::int64_t output) const {
        return output % plan_.row_tiles * plan_.tile_rows;
    }
    std::int64_t end_row(std::int64_t output) const {
        return std::min(first_row(output) + plan_.tile_rows, plan_.rows);
    }

    void attend_item(std::int64_t output, std::int64_t split, int slot,
                     std::int64_t state_index) const {
        Split from = plan_.splits[split];
        const Split& end = plan_.splits[split + 1];
        if (call_.begins) {
            const std::int64_t query = first_row(output) / plan_.group;
            from = skip_unseen(call_.run, from, end.block, call_.begins[query]);
        }
        const AttendItem item{
            .geometry = call_.geometry,
            .query = call_.query,
            .run = call_.run,
            .kv_head = first_head(output),
            .heads = plan_.heads,
            .group = plan_.group,
            .row_begin = first_row(output),
            .row_end = end_row(output),
            .block = from.block,
            .token_begin = from.token,
            .token_end = end.token,
            .ends = call_.ends,
            .visible_first = call_.causal ? plan_.tokens - call_.n + 1 : plan_.tokens,
            .visible_step = call_.causal ? 1 : 0,
            .begins = call_.begins,
            .scale_log2e = static_cast<float>(call_.scale * 1.4426950408889634),
            .state = state(state_index),
            .scratch = scratch_ + scratch_bytes_ * slot,
        };
        kernel()(item);
    }

    // Of the output's rows the given piece, of so many.
    void finish(std::int64_t output, std::int64_t state_index, int head, int heads,
                std::int64_t piece = 0, std::int64_t pieces = 1) const {
        const std::int64_t begin = first_row(output), rows = end_row(output) - begin;
        const std::int64_t first = rows * piece / pieces;
        State part = state(state_index, head);
        part.values += first * row_floats_;
        part.max += first;
        part.sum += first;
        kernels_.finish({
            .state = part,
            .splits = static_cast<int>(plan_.split_count()),
            .step = state_rows_,
            .out = call_.out,
            .out_dtype = call_.out_dtype,
            .lse = call_.lse,
            .top = call_.top,
            .top_factor = call_.scale != 0 ? 0.693147181f / call_.scale : 0,
            .lse_stride = call_.n,
            .sinks = call_.sinks,
            .kv_head = first_head(output) + head,
            .heads = heads,
            .group = plan_.group,
            .value_dim = call_.geometry.value_dim,
            .row_begin = begin + first,
            .row_end = begin + rows * (piece + 1) / pieces,
        });
    }

    const AttendCall& call_;
    const Plan plan_;
    const Kernels& kernels_;
    std::byte* scratch_ = nullptr;
    std::size_t scratch_bytes_ = 0;
    std::int64_t state_rows_ = 0;
    std::int64_t row_floats_ = 0;
    float* values_ = nullptr;
    float* max_ = nullptr;
    float* sum_ = nullptr;
};

}  // namespace

void leave_processor() {
    leaves_processor = true;
}

int attend_threads(const Geometry& geometry, std::int64_t tokens) {
    return threads_for(elements_of(geometry, tokens, geometry.kv_heads));
}

void check_attended(const AttendCall& call) {
    check_attendable(call.geometry);
    const std::int64_t tokens = count_tokens(call.geometry, call.run);
    check_causal(call, tokens);
    check_ends(call, tokens);
    if (call.window < 0) {
        throw std::invalid_argument("window is " + std::to_string(call.window) +
                                    "; expected a number of tokens, or 0 for all");
    }
}

void attend_uniform(const AttendCall& call) {
    check_attended(call);
    check_format(call.geometry, call.format);
    if (call.n == 0 || call.kv_begin == call.kv_end) return;
    const std::int64_t first =
        call.begins ? skip_unseen(call.run, {0, 0}, call.run.blocks, call.begins[0]).block : 0;
    require_blocks(call.geometry, call.run.table + first, call.run.counts + first,
                   call.run.blocks - first, call.kv_begin, call.kv_end);
    Attention attention(call);
    attention.run();
}

}  // namespace kvdb
