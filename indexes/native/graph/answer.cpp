#include "answer.h"

#include <algorithm>
#include <cmath>

#include "../score/kernels.h"

namespace kvdb::indexes {

namespace {

// Drops what exact scores show to lie outside; the limit by these.
float keep_range(float floor, float beta, RowFound& out) {
    float best = floor;
    for (const float score : out.scores) best = std::max(best, score);
    const float limit = best - beta;
    std::size_t kept = 0;
    for (std::size_t t = 0; t < out.ids.size(); ++t) {
        if (out.scores[t] < limit) continue;
        out.ids[kept] = out.ids[t];
        out.scores[kept++] = out.scores[t];
    }
    out.ids.resize(kept);
    out.scores.resize(kept);
    return limit;
}

float keep_largest(std::size_t k, float limit, RowFound& out) {
    const std::size_t count = out.ids.size();
    k = std::min(k, count);
    std::vector<std::uint32_t> order(count);
    for (std::size_t t = 0; t < count; ++t) order[t] = static_cast<std::uint32_t>(t);
    std::nth_element(order.begin(), order.begin() + k, order.end(), [&](auto a, auto b) {
        return out.scores[a] != out.scores[b] ? out.scores[a] > out.scores[b] : a < b;
    });
    std::sort(order.begin(), order.begin() + k);
    for (std::size_t t = 0; t < k; ++t) {
        out.ids[t] = out.ids[order[t]];
        out.scores[t] = out.scores[order[t]];
    }
    out.ids.resize(k);
    out.scores.resize(k);
    return k > 0 ? *std::min_element(out.scores.begin(), out.scores.end()) : limit;
}

float rescore(const Task& task, std::int64_t r, const Range& range, RowFound& out) {
    const auto count = static_cast<std::int64_t>(out.ids.size());
    out.scores.resize(count);
    score_kernels().score[static_cast<int>(task.blocks.geometry.dtype)](
        {task.blocks, task.kv_head, task.q(r), 1, out.ids.data(), count, out.scores.data(), 0});
    const SearchOptions& options = task.options;
    return options.k > 0 ? keep_largest(static_cast<std::size_t>(options.k), range.limit(), out)
                         : keep_range(range.floor(), options.beta, out);
}

// Every token not found as far along the query as a key can be.
float bound_missed(const Task& task, std::int64_t r, float highest, std::int64_t left) {
    const float* q = task.q(r);
    double square = 0;
    for (int i = 0; i < task.graph.head_dim; ++i) square += double{q[i]} * q[i];
    const double most =
        double{highest} + std::sqrt(square) * double{task.probes.radius[task.kv_head]};
    return static_cast<float>(task.options.scale * (most + 1e-5 * std::abs(most)) +
                              std::log(static_cast<double>(left)) + 1e-5);
}

// From the random probes below the limit, each of which stands for as many tokens. Of a query that
// was left, from all.
float estimate_missed(const Task& task, float limit, const ProbeScores& probes) {
    const std::int64_t count = task.probes.random;
    float largest = kNone;
    for (std::int64_t t = 0; t < count; ++t) {
        if (probes.scores[t] >= limit) probes.scores[t] = kNone;
        largest = std::max(largest, probes.scores[t]);
    }
    if (largest == kNone) return kNone;
    const float scale = task.options.scale;
    const float sum = graph_kernels().mass(probes.scores, count, largest, scale);
    const auto each = static_cast<double>(task.visible) / static_cast<double>(probes.seen);
    return static_cast<float>(scale * double{largest} + std::log(double{sum} * each));
}

}  // namespace

void answer(const Task& task, std::int64_t r, Range& range, const ProbeScores& probes,
            RowFound& out) {
    out.dense = range.dense();
    range.take(out.ids);
    const float limit = rescore(task, r, range, out);
    out.missed = out.bound = kNone;
    const std::int64_t left = task.visible - static_cast<std::int64_t>(out.ids.size());
    if (left <= 0) return;
    out.missed = estimate_missed(task, out.dense ? -kNone : limit, probes);
    out.bound = bound_missed(task, r, probes.highest, left);
}

}  // namespace kvdb::indexes
