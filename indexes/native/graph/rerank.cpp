#include "rerank.h"

#include <algorithm>
#include <cmath>

#include "../score/kernels.h"

namespace kvdb::indexes::graph {

namespace {

// Drops the tokens that lie outside of the range by their exact scores, which also set the limit.
float keep_range(float floor, float beta, RowResult& out) {
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

float keep_largest(std::size_t k, float limit, RowResult& out) {
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

float rescore(const QueryGroup& group, std::int64_t r, const Range& range, RowResult& out) {
    const auto count = static_cast<std::int64_t>(out.ids.size());
    out.scores.resize(count);
    score_tokens(
        {group.blocks, group.kv_head, group.q(r), 1, out.ids.data(), count, out.scores.data(), 0});
    const GraphOptions& options = group.options;
    return options.k > 0 ? keep_largest(static_cast<std::size_t>(options.k), range.limit(), out)
                         : keep_range(range.floor(), options.beta, out);
}

// Bounds the missed mass as if every token that was not retrieved had the highest possible score.
float bound_missed(const QueryGroup& group, std::int64_t r, float highest, std::int64_t left) {
    const float* q = group.q(r);
    double square = 0;
    for (int i = 0; i < group.graph.head_dim; ++i) square += double{q[i]} * q[i];
    const double most =
        double{highest} + std::sqrt(square) * double{group.probes.radius[group.kv_head]};
    return static_cast<float>(group.options.scale * (most + 1e-5 * std::abs(most)) +
                              std::log(static_cast<double>(left)) + 1e-5);
}

// Estimates from the random probes below the limit, each of which represents the same number of
// tokens; without such probes, every token that was not found counts as if it were at the limit. A
// query that was given up is estimated from all probes.
float estimate_missed(const QueryGroup& group, float limit, const ProbeScores& probes,
                      std::int64_t left) {
    const std::int64_t count = group.probes.random;
    float largest = kNone;
    for (std::int64_t t = 0; t < count; ++t) {
        if (probes.scores[t] >= limit) probes.scores[t] = kNone;
        largest = std::max(largest, probes.scores[t]);
    }
    const float scale = group.options.scale;
    if (largest == kNone) return scale * limit + std::log(static_cast<float>(left));
    const float sum = graph_kernels().mass(probes.scores, count, largest, scale);
    const auto each = static_cast<double>(group.visible) / static_cast<double>(probes.seen);
    return static_cast<float>(scale * double{largest} + std::log(double{sum} * each));
}

}  // namespace

void rerank(const QueryGroup& group, std::int64_t r, Range& range, const ProbeScores& probes,
            RowResult& out) {
    out.dense = range.dense();
    range.collect(out.ids);
    const float limit = rescore(group, r, range, out);
    out.missed = out.bound = kNone;
    const std::int64_t left = group.visible - static_cast<std::int64_t>(out.ids.size());
    if (left <= 0) return;
    out.bound = bound_missed(group, r, probes.highest, left);
    const float estimate = estimate_missed(group, out.dense ? -kNone : limit, probes, left);
    out.missed = estimate > kNone ? std::min(estimate, out.bound) : out.bound;
}

}  // namespace kvdb::indexes::graph
