#include "layer_steps.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "transfer.h"

namespace kvdb {
namespace {

using Clock = std::chrono::steady_clock;

// Takes a token back unless it is kept.
class AppendedToken {
  public:
    explicit AppendedToken(std::int32_t& count) : count_(count) { ++count_; }
    AppendedToken(const AppendedToken&) = delete;
    AppendedToken& operator=(const AppendedToken&) = delete;
    ~AppendedToken() { count_ -= !kept_; }
    void keep() { kept_ = true; }

  private:
    std::int32_t& count_;
    bool kept_ = false;
};

}  // namespace

LayerSteps::LayerSteps(const Geometry& geometry, int q_heads, float scale)
    : geometry(geometry),
      q_heads(q_heads),
      scale_(scale),
      last_query_(q_heads * geometry.row_bytes()),
      query_before_(last_query_.size()),
      logs_(3 * q_heads) {}

bool LayerSteps::goes_on() const {
    return course_.steps > 0 && samples_.size() < kSamplesMax &&
           std::all_of(
               course_.facts.begin(), course_.facts.end(),
               [](const auto& fact) { return fact.first->value() == fact.second; });
}

bool LayerSteps::step(const Rows& q, const Rows& k, const Rows& v, void* out) {
    const std::int64_t last = course_.blocks - 1;
    if (!finite(geometry, q_heads, 1, q)) return false;
    if (append(geometry, {course_.table + last, 1}, course_.counts[last], 1, k, v)) return false;
    AppendedToken token(course_.counts[last]);
    const StepTotals before = totals_;
    if (!answer(q, out)) return false;
    totals_before_ = before;
    token.keep();
    ++course_.tokens;
    --course_.steps;
    keep(q);
    return true;
}

void LayerSteps::undo() {
    --course_.counts[course_.blocks - 1];
    --course_.tokens;
    ++course_.steps;
    totals_ = totals_before_;
    sample_in_ = sample_in_before_;
    samples_.resize(samples_before_);
    std::swap(last_query_, query_before_);
}

void LayerSteps::sample_next(std::int64_t in, std::int64_t every) {
    sample_in_ = in;
    sample_every_ = every;
}

void LayerSteps::keep(const Rows& q) {
    std::swap(last_query_, query_before_);
    sample_in_before_ = sample_in_;
    samples_before_ = samples_.size();
    const std::size_t bytes = geometry.row_bytes();
    for (int head = 0; head < q_heads; ++head) {
        const std::int64_t at =
            head * q.head_stride * static_cast<std::int64_t>(geometry.element_bytes());
        std::memcpy(last_query_.data() + head * bytes, static_cast<const std::byte*>(q.data) + at,
                    bytes);
    }
    if (sample_every_ == 0 || sample_in_-- > 0) return;
    sample_in_ = sample_every_ - 1;
    samples_.push_back({totals_.steps - 1, last_query_});
}

// Whether float32 could hold the answer. Only then it is counted.
bool LayerSteps::answer(const Rows& q, void* out) {
    StepTotals spent;
    const auto started = Clock::now();
    if (!course_.plan) {
        read_all(q, out, spent);
    } else if (!search(q, out, spent)) {
        return false;
    }
    spent.ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - started).count();
    const bool held = std::all_of(logs_.begin(), logs_.begin() + q_heads,
                                  [](float x) { return std::isfinite(x); });
    const std::int64_t head_dim = geometry.head_dim;
    if (!held || !finite(geometry, q_heads, 1, {out, head_dim, head_dim})) return false;
    totals_.steps += 1;
    totals_.nbytes += spent.nbytes;
    totals_.ns += spent.ns;
    totals_.scanned += spent.scanned;
    totals_.retrieved += spent.retrieved;
    totals_.missed += spent.missed;
    totals_.bound += spent.bound;
    totals_.bound_max = std::max(totals_.bound_max, spent.bound_max);
    return true;
}

bool LayerSteps::search(const Rows& q, void* out, StepTotals& spent) {
    const StepResult result =
        run_step(*course_.plan, {q, course_.table, course_.counts, course_.blocks, out,
                                 logs_.data(), logs_.data() + q_heads, logs_.data() + 2 * q_heads});
    if (result.end == StepEnd::not_finite) return false;
    spent.nbytes = result.nbytes;
    if (result.end == StepEnd::reads_everything) {
        read_all(q, out, spent);
        return true;
    }
    spent.scanned = result.scanned;
    spent.retrieved = result.retrieved;
    spent.missed = result.missed.mean;
    spent.bound = result.bound.mean;
    spent.bound_max = result.bound.largest;
    return true;
}

void LayerSteps::read_all(const Rows& q, void* out, StepTotals& spent) {
    const std::int64_t head_dim = geometry.head_dim, tokens = course_.tokens + 1;
    AttendCall call{};
    call.geometry = geometry;
    call.query = q;
    call.q_heads = q_heads;
    call.n = 1;
    call.run = {course_.table, course_.counts, course_.blocks};
    call.kv_begin = 0;
    call.kv_end = geometry.kv_heads;
    call.causal = 1;
    call.scale = scale_;
    call.out = {out, head_dim, head_dim};
    call.out_dtype = geometry.dtype;
    call.lse = logs_.data();
    attend(call);
    const auto token_bytes =
        static_cast<std::int64_t>(2 * geometry.kv_heads * geometry.row_bytes());
    spent.scanned = spent.retrieved = static_cast<double>(tokens);
    spent.nbytes += tokens * token_bytes;
}

}  // namespace kvdb
