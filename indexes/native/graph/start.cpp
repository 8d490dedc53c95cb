// How a walk begins.
#include "../score/kernels.h"
#include "top.h"
#include "walk.h"

namespace kvdb::indexes {

namespace {

constexpr int kStarts = 4;  // probes of each row that are expanded whatever their score

}  // namespace

// Keys that codes do not hold well are looked at themselves, always.
void Walk::outliers() {
    const Probes& probes = task_->probes;
    const std::int32_t* tokens = probes.outliers + task_->kv_head * probes.outlier_count;
    std::int64_t count = 0;
    while (count < probes.outlier_count && tokens[count] >= 0) ++count;
    if (count == 0) return;
    std::vector<float> exact(count);
    for (int r = 0; r < task_->heads; ++r) {
        score_kernels().score[static_cast<int>(task_->blocks.geometry.dtype)](
            {task_->blocks, task_->kv_head, task_->q(r), 1, tokens, count, exact.data(), 0});
        for (std::int64_t t = 0; t < count; ++t) {
            if (task_->sees(tokens[t])) ranges_[r].offer(tokens[t], exact[t]);
        }
    }
    for (std::int64_t t = 0; t < count; ++t) visited_.insert(tokens[t]);
    nbytes_ += count * task_->key_nbytes();
}

// The best of them are known before any is offered, so that few of them become candidates.
void Walk::look_at_probes() {
    const Probes& probes = task_->probes;
    const std::int64_t count = probes.count;
    estimate(probes.codes + task_->kv_head * count * task_->graph.stride, nullptr, count);
    scanned_ += count;
    const std::int32_t* tokens = task_->probe_tokens();
    margins_.resize(count);
    for (std::int64_t t = 0; t < count; ++t) {
        const bool seen = task_->sees(tokens[t]);
        margins_[t] = seen ? 0 : kNone;
        probes_seen_ += seen && t < probes.random;
    }
    for (int r = 0; r < task_->heads; ++r) {
        const float* scores = scores_.data() + r * room_;
        float* visible = probe_scores(r);
        for (std::int64_t t = 0; t < count; ++t) visible[t] = margins_[t] < 0 ? kNone : scores[t];
        ranges_[r].expect(Lanes(visible, count).largest());
    }
}

void Walk::start() {
    const std::int64_t count = task_->probes.count;
    const std::int32_t* tokens = task_->probe_tokens();
    // Probes that nobody wants are not remembered: to meet one again costs less.
    const float* margins = measure_margins(count);
    for (std::int64_t t = 0; t < count; ++t) {
        if (margins[t] >= 0 && visited_.insert(tokens[t])) push(tokens[t], t);
    }
    for (int r = 0; r < task_->heads; ++r) {
        if (!ranges_[r].done()) start_row(r);
    }
}

// The largest probes of a row are expanded even if they lie outside of the range; hidden ones too.
void Walk::start_row(std::int64_t r) {
    const float* scores = scores_.data() + r * room_;
    std::int32_t top[kStarts];
    const int have = find_top(scores, task_->probes.count, top);
    for (int j = 0; j < have; ++j) {
        const float score = scores[top[j]];
        push_step(score - ranges_[r].limit(), score, task_->probe_tokens()[top[j]], r);
    }
}

}  // namespace kvdb::indexes
