// Entry points of a beam search: outliers, probes, and the first tokens of the frontier.
#include <cmath>

#include "../score/kernels.h"
#include "beam_search.h"
#include "largest.h"

namespace kvdb::indexes::graph {

namespace {

constexpr int kStarts = 4;  // probes of each row that are expanded whatever their score

}  // namespace

// Keys that their codes describe badly are scored exactly, unless not even the length of what their
// codes leave of them can bring them into the range.
void BeamSearch::score_outliers() {
    const Probes& probes = group_->probes;
    const std::int64_t first = group_->kv_head * probes.outlier_count;
    const std::int32_t* tokens = probes.outliers + first;
    std::int64_t count = 0;
    while (count < probes.outlier_count && tokens[count] >= 0) ++count;
    if (count == 0) return;
    outlier_scores_.resize(group_->heads * count);
    estimate_in_order(probes.outlier_codes + first * group_->graph.stride, count,
                      outlier_scores_.data(), count);
    for (int r = 0; r < group_->heads; ++r) {
        if (!ranges_[r].done()) score_near_outliers(r, count);
    }
    for (std::int64_t t = 0; t < count; ++t) visited_.insert(tokens[t]);
    nbytes_ += count * group_->graph.stride;
}

void BeamSearch::score_near_outliers(std::int64_t r, std::int64_t count) {
    const std::int64_t first = group_->kv_head * group_->probes.outlier_count;
    const std::int32_t* tokens = group_->probes.outliers + first;
    const float* residual = group_->probes.outlier_residual + first;
    const float* scores = outlier_scores_.data() + r * count;
    const float* q = group_->q(r);
    double square = 0;
    for (int i = 0; i < group_->graph.head_dim; ++i) square += double{q[i]} * q[i];
    const auto length = static_cast<float>(std::sqrt(square) * (1 + 1e-5));
    near_outliers_.clear();
    for (std::int64_t t = 0; t < count; ++t) {
        const bool near = scores[t] + length * residual[t] >= ranges_[r].limit();
        if (near && group_->sees(tokens[t])) near_outliers_.push_back(tokens[t]);
    }
    const auto near = static_cast<std::int64_t>(near_outliers_.size());
    exact_.resize(near);
    score_tokens(
        {group_->blocks, group_->kv_head, q, 1, near_outliers_.data(), near, exact_.data(), 0});
    for (std::int64_t t = 0; t < near; ++t) ranges_[r].add(near_outliers_[t], exact_[t]);
    nbytes_ += near * group_->key_nbytes();
}

// The best scores are known before any probe is offered, so that few probes become candidates.
void BeamSearch::score_probes() {
    const Probes& probes = group_->probes;
    const std::int64_t count = probes.count;
    make_room(count);
    estimate_in_order(probes.codes + group_->kv_head * count * group_->graph.stride, count,
                      scores_.data(), room_);
    scanned_ += count;
    const std::int32_t* tokens = group_->probe_tokens();
    margins_.resize(count);
    for (std::int64_t t = 0; t < count; ++t) {
        const bool seen = group_->sees(tokens[t]);
        margins_[t] = seen ? 0 : kNone;
        probes_seen_ += seen && t < probes.random;
    }
    for (int r = 0; r < group_->heads; ++r) {
        const float* scores = scores_.data() + r * room_;
        float* visible = probe_scores(r);
        for (std::int64_t t = 0; t < count; ++t) visible[t] = margins_[t] < 0 ? kNone : scores[t];
        ranges_[r].raise_best(Lanes(visible, count).largest());
    }
}

void BeamSearch::seed_frontier() {
    const std::int64_t count = group_->probes.count;
    const std::int32_t* tokens = group_->probe_tokens();
    // Probes that no row needs are not marked as visited: scoring one again costs less.
    const float* margins = measure_margins(count);
    for (std::int64_t t = 0; t < count; ++t) {
        if (margins[t] >= 0 && visited_.insert(tokens[t])) push(tokens[t], t);
    }
    for (int r = 0; r < group_->heads; ++r) {
        if (!ranges_[r].done()) seed_row(r);
    }
}

// The largest probes of a row are expanded even if they lie outside of the range; hidden ones too.
void BeamSearch::seed_row(std::int64_t r) {
    const float* scores = scores_.data() + r * room_;
    std::int32_t top[kStarts];
    const int have = find_largest(scores, group_->probes.count, top);
    for (int j = 0; j < have; ++j) {
        const float score = scores[top[j]];
        push_frontier(score - ranges_[r].limit(), score, group_->probe_tokens()[top[j]], r);
    }
}

}  // namespace kvdb::indexes::graph
