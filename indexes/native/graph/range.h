// What one query wants, as far as a walk knows, and what has been found for it.
#pragma once

#include <cstdint>
#include <vector>

#include "task.h"

namespace kvdb::indexes {

// By estimates of scores. The range reaches from the best token, or from the floor, so far down as
// is asked for; of a search for k tokens, down to the last of the largest.
class Range {
  public:
    void begin(const SearchOptions& options, float floor, float noise, bool done);

    // A token has this score, whether the query sees it or not.
    void meet(float score) {
        if (score > seen_) {
            seen_ = score;
            patience_ = options_->patience;
        }
    }
    // One that it sees.
    void offer(std::uint32_t token, float score);
    // The best of many is known before they are offered.
    void expect(float score) {
        if (options_->k == 0 && score > best_) raise(score);
    }

    // Whether a walk may take a step from a token; of those outside of the range, as many as there
    // is patience for and that come closer.
    bool leads(float score) const {
        return score >= limit_ - beyond_ || (patience_ > 0 && score >= near());
    }
    // Takes it.
    bool wants(float score) {
        if (done_) return false;
        if (score >= limit_ - beyond_) return true;
        if (patience_ <= 0) return false;
        --patience_;
        return true;
    }
    // Below it a token is neither found nor a step.
    float least() const;

    bool crowded() const { return static_cast<std::int64_t>(found_.size()) > check_; }
    // Drops what is no longer in range; how many are left.
    std::int64_t compact();
    void check_again_beyond(std::int64_t count) { check_ = count; }
    // The query is left unanswered.
    void leave() {
        dense_ = done_ = true;
        found_.clear();
    }

    float floor() const { return floor_; }
    float limit() const { return limit_; }
    bool done() const { return done_; }
    bool dense() const { return dense_; }
    // Ascending, each once.
    void take(std::vector<std::int32_t>& ids);

  private:
    struct Candidate {
        float score;
        std::uint32_t token;
    };

    float near() const { return seen_ - beyond_ - options_->beta; }
    void raise(float score);
    void offer_largest(float score);

    const SearchOptions* options_ = nullptr;
    float floor_, best_, seen_;  // seen: the best, hidden ones included
    float limit_, noise_, beyond_;
    int patience_;
    bool dense_, done_;
    std::int64_t check_;  // with so many found, it is time to look whether the range is too full
    std::size_t width_;
    std::vector<Candidate> found_;
    std::vector<float> largest_;  // of a search for k: a heap, the smallest on top
};

inline constexpr std::int64_t kDenseCheck = 128;  // fewer are no reason to leave a query

// Estimates are not exact: of a search for k so many are kept.
inline std::int64_t width_of(std::int64_t k) {
    return k > 0 ? k + k / 2 + 32 : 0;
}

}  // namespace kvdb::indexes
