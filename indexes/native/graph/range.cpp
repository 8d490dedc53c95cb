#include "range.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace kvdb::indexes::graph {

void Range::begin(const GraphOptions& options, float floor, float noise, bool done) {
    options_ = &options;
    floor_ = options.k > 0 ? kNone : floor;
    best_ = seen_ = kNone;
    noise_ = noise;
    limit_ = floor_ - noise - options.beta;
    beyond_ = options.slack * options.beta;
    patience_ = options.patience;
    dense_ = false;
    done_ = done;
    check_ = kDenseCheck;
    width_ = static_cast<std::size_t>(width_of(options.k));
    candidates_.clear();
    largest_.clear();
}

void Range::add(std::uint32_t token, float score) {
    if (score < limit_) return;
    candidates_.push_back({score, token});
    if (width_ > 0) {
        keep_largest_score(score);
    } else if (score > best_) {
        raise(score);
    }
}

void Range::keep_largest_score(float score) {
    if (largest_.size() < width_) {
        largest_.push_back(score);
        std::push_heap(largest_.begin(), largest_.end(), std::greater<>());
    } else if (score > largest_.front()) {
        std::pop_heap(largest_.begin(), largest_.end(), std::greater<>());
        largest_.back() = score;
        std::push_heap(largest_.begin(), largest_.end(), std::greater<>());
    }
    if (largest_.size() == width_) limit_ = largest_.front();
}

void Range::raise(float score) {
    best_ = score;
    // The errors of two independent estimates.
    limit_ = std::max(floor_ - noise_, score - 1.5f * noise_) - options_->beta;
}

float Range::least() const {
    float least = limit_ - beyond_;
    if (patience_ > 0 && seen_ > kNone) least = std::min(least, near());
    return least > kNone ? least : std::numeric_limits<float>::lowest();
}

std::int64_t Range::compact() {
    std::erase_if(candidates_,
                  [&](const Candidate& candidate) { return candidate.score < limit_; });
    return static_cast<std::int64_t>(candidates_.size());
}

void Range::collect(std::vector<std::int32_t>& ids) {
    ids.clear();
    for (const Candidate& candidate : candidates_) {
        if (candidate.score >= limit_) ids.push_back(static_cast<std::int32_t>(candidate.token));
    }
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());  // an outlier may be there twice
}

}  // namespace kvdb::indexes::graph
