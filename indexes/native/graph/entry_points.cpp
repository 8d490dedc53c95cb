// Entry points of a beam search: outliers, probes, and the first tokens of the frontier.
#include "../score/kernels.h"
#include "beam_search.h"
#include "largest.h"

namespace kvdb::indexes::graph {

namespace {

constexpr int kStarts = 4;  // probes of each row that are expanded whatever their score

}  // namespace

// Keys that their codes describe badly are always scored exactly.
void BeamSearch::score_outliers() {
    const Probes& probes = group_->probes;
    const std::int32_t* tokens = probes.outliers + group_->kv_head * probes.outlier_count;
    std::int64_t count = 0;
    while (count < probes.outlier_count && tokens[count] >= 0) ++count;
    if (count == 0) return;
    std::vector<float> exact(count);
    for (int r = 0; r < group_->heads; ++r) {
        score_tokens(
            {group_->blocks, group_->kv_head, group_->q(r), 1, tokens, count, exact.data(), 0});
        for (std::int64_t t = 0; t < count; ++t) {
            if (group_->sees(tokens[t])) ranges_[r].add(tokens[t], exact[t]);
        }
    }
    for (std::int64_t t = 0; t < count; ++t) visited_.insert(tokens[t]);
    nbytes_ += count * group_->key_nbytes();
}

// The best scores are known before any probe is offered, so that few probes become candidates.
void BeamSearch::score_probes() {
    const Probes& probes = group_->probes;
    const std::int64_t count = probes.count;
    estimate(probes.codes + group_->kv_head * count * group_->graph.stride, nullptr, count);
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
