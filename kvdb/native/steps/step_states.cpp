#include "step_states.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace kvdb {

void shorten(StepBlocks& blocks, std::int64_t tokens) {
    while (tokens > 0) {
        if (blocks.counts.empty()) throw std::invalid_argument("the window has too few tokens");
        const auto here = std::min<std::int64_t>(tokens, blocks.counts.back());
        blocks.counts.back() -= static_cast<std::int32_t>(here);
        tokens -= here;
        if (blocks.counts.back() > 0) return;
        blocks.counts.pop_back();
        blocks.table.pop_back();
    }
}

void attend_blocks(const StepPlan& plan, const Rows& query, const StepBlocks& blocks, States& to,
                   float* top, int kv_begin, int kv_end) {
    const std::int64_t value_dim = plan.geometry.value_dim;
    AttendCall call{};
    call.geometry = plan.geometry;
    call.query = query;
    call.q_heads = plan.q_heads;
    call.n = 1;
    call.run = {blocks.table.data(), blocks.counts.data(),
                static_cast<std::int64_t>(blocks.table.size()),
                blocks.placement ? &*blocks.placement : nullptr};
    call.kv_begin = kv_begin;
    call.kv_end = kv_end;
    call.scale = plan.scale;
    call.out = {to.out.data(), value_dim, value_dim};
    call.out_dtype = Dtype::float32;
    call.lse = to.lse.data();
    call.top = top;
    attend(call);
}

void merge_states(const StepPlan& plan, const States& from, const States* other,
                  const indexes::SearchResult* found, const std::uint64_t* table, void* out,
                  Dtype out_dtype, float* lse) {
    const std::vector<std::int64_t> none(found ? 0 : plan.q_heads + 1);
    AttendRetrievedCall call{};
    call.geometry = plan.geometry;
    call.table = table;
    call.q_heads = plan.q_heads;
    call.n = 1;
    call.offsets = found ? found->retrieved.offsets.data() : none.data();
    call.ids = found ? found->retrieved.ids.data() : nullptr;
    call.scores = found ? found->retrieved.scores.data() : nullptr;
    call.scale = plan.scale;
    call.state_out = from.out.data();
    call.state_lse = from.lse.data();
    call.tail_out = other ? other->out.data() : nullptr;
    call.tail_lse = other ? other->lse.data() : nullptr;
    call.out = out;
    call.out_dtype = out_dtype;
    call.lse = lse;
    attend_retrieved(call);
}

void merge_into(const StepPlan& plan, States& states, const States& other) {
    merge_states(plan, states, &other, nullptr, nullptr, states.out.data(), Dtype::float32,
                 states.lse.data());
}

void add_sinks(States& states, const float* sinks) {
    const std::size_t value_dim = states.out.size() / states.lse.size();
    for (std::size_t row = 0; row < states.lse.size(); ++row) {
        const float before = states.lse[row];
        states.lse[row] = log_sum(before, sinks[row]);
        if (before == -INFINITY) continue;  // out is zero
        const float share = std::exp(before - states.lse[row]);
        for (std::size_t i = 0; i < value_dim; ++i) states.out[row * value_dim + i] *= share;
    }
}

float log_sum(float a, float b) {
    if (std::isnan(a) || std::isnan(b)) return NAN;
    const double most = std::max(a, b);
    if (!std::isfinite(most)) return static_cast<float>(most);
    return static_cast<float>(most + std::log(std::exp(a - most) + std::exp(b - most)));
}

bool all_finite(const std::vector<float>& values) {
    float sum = 0;
    for (const float value : values) sum += value * 0.0f;
    return sum == 0;
}

bool finite_or_none(const std::vector<float>& lse) {
    return std::all_of(lse.begin(), lse.end(), [](float x) { return x < INFINITY; });
}

}  // namespace kvdb
