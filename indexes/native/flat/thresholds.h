// The threshold of each row: no token below it can be in the result.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "flat.h"

namespace kvdb::indexes::flat {

// Threads may raise at the same time. Thresholds only rise, so a token that was dropped once can
// never be in the result.
class Thresholds {
  public:
    // floor: of each row, the largest q.k elsewhere.
    Thresholds(const FlatOptions& options, std::int64_t rows, const float* floor);

    bool by_rank() const { return options_.k > 0; }
    const FlatOptions& options() const { return options_; }

    float of(std::int64_t row) const {
        if (dropped_[row]) return INFINITY;
        const float best = best_[row].load(std::memory_order_relaxed);
        if (by_rank()) return best;
        return options_.beta == INFINITY ? -INFINITY : best - options_.beta;
    }

    // Notes that the row sees a token of this q.k, for thresholds below the largest q.k.
    void raise(std::int64_t row, float score) {
        float known = best_[row].load(std::memory_order_relaxed);
        while (score > known &&
               !best_[row].compare_exchange_weak(known, score, std::memory_order_relaxed)) {
        }
    }

    // Notes that the row sees tokens of these q.k, all different tokens, for thresholds at the k-th
    // largest q.k.
    void rank(std::int64_t row, const float* scores, std::int64_t count);

    // Leaves the row unanswered. Must not run while other threads use this row.
    void drop(std::int64_t row) { dropped_[row] = true; }
    bool dropped(std::int64_t row) const { return dropped_[row]; }

  private:
    const FlatOptions options_;
    std::vector<std::atomic<float>> best_;  // the largest q.k so far, or the k-th largest
    std::vector<std::uint8_t> dropped_;
    std::vector<std::vector<float>> top_;  // heaps
    std::unique_ptr<std::mutex[]> locks_;
};

}  // namespace kvdb::indexes::flat
