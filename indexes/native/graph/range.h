// The range of scores that one query still accepts, and its candidates.
#pragma once

#include <cstdint>
#include <vector>

#include "query_group.h"

namespace kvdb::indexes::graph {

// Scores are estimates. The range reaches from the best token, or from the floor, down by beta; in
// a search for k tokens, down to the k-th largest score.
class Range {
  public:
    void begin(const GraphOptions& options, float floor, float noise, bool done);

    // Notes the score of a token, whether the query sees it or not.
    void see(float score) {
        if (score > seen_) {
            seen_ = score;
            patience_ = options_->patience;
        }
    }
    // Adds a token that the query sees.
    void add(std::uint32_t token, float score);
    // Raises the best score before the tokens are added.
    void raise_best(float score) {
        if (options_->k == 0 && score > best_) raise(score);
    }

    // Whether a token belongs in the frontier: inside the range, or, while there is patience, near
    // it.
    bool worth_queueing(float score) const {
        return score >= limit_ - beyond_ || (patience_ > 0 && score >= near());
    }
    // Whether to expand it now; one outside of the range costs patience.
    bool worth_expanding(float score) {
        if (done_) return false;
        if (score >= limit_ - beyond_) return true;
        if (patience_ <= 0) return false;
        --patience_;
        return true;
    }
    // Tokens with a lower score are neither candidates nor in the frontier.
    float least() const;

    bool check_due() const { return static_cast<std::int64_t>(candidates_.size()) > check_; }
    // Drops the candidates that are no longer in range; returns how many are left.
    std::int64_t compact();
    void check_again_beyond(std::int64_t count) { check_ = count; }
    // Leaves the query unanswered.
    void give_up_row() {
        dense_ = done_ = true;
        candidates_.clear();
    }

    float floor() const { return floor_; }
    float limit() const { return limit_; }
    bool done() const { return done_; }
    bool dense() const { return dense_; }
    // Ascending, each once.
    void collect(std::vector<std::int32_t>& ids);

  private:
    struct Candidate {
        float score;
        std::uint32_t token;
    };

    float near() const { return seen_ - beyond_ - options_->beta; }
    void raise(float score);
    void keep_largest_score(float score);

    const GraphOptions* options_ = nullptr;
    float floor_, best_, seen_;  // seen: the best, hidden ones included
    float limit_, noise_, beyond_;
    int patience_;
    bool dense_, done_;
    std::int64_t
        check_;  // with more candidates, it is time to check whether the range is too dense
    std::size_t width_;
    std::vector<Candidate> candidates_;
    std::vector<float> largest_;  // of a search for k: a heap, the smallest on top
};

inline constexpr std::int64_t kDenseCheck = 128;  // fewer are no reason to leave a query

// Estimates are not exact, so a search for k keeps this many.
inline std::int64_t width_of(std::int64_t k) {
    return k > 0 ? k + k / 2 + 32 : 0;
}

}  // namespace kvdb::indexes::graph
