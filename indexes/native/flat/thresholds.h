// What each row wants, as far as is known: nothing below its threshold.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "flat.h"

namespace kvdb::indexes {

// Threads may raise at the same time. Thresholds only rise, so that what one drops nobody wants.
class Thresholds {
  public:
    // floor: of each row, the largest q.k elsewhere.
    Thresholds(const FlatWanted& wanted, std::int64_t rows, const float* floor);

    bool by_rank() const { return wanted_.k > 0; }
    const FlatWanted& wanted() const { return wanted_; }

    float of(std::int64_t row) const {
        if (dropped_[row]) return INFINITY;
        const float best = best_[row].load(std::memory_order_relaxed);
        if (by_rank()) return best;
        return wanted_.beta == INFINITY ? -INFINITY : best - wanted_.beta;
    }

    // The row sees a token of this q.k; where the threshold hangs on the largest.
    void raise(std::int64_t row, float score) {
        float known = best_[row].load(std::memory_order_relaxed);
        while (score > known &&
               !best_[row].compare_exchange_weak(known, score, std::memory_order_relaxed)) {
        }
    }

    // The row sees tokens of these q.k, all different; where the threshold hangs on the k-th
    // largest.
    void rank(std::int64_t row, const float* scores, std::int64_t count);

    // The row is left unanswered. Not while other threads look at this row.
    void drop(std::int64_t row) { dropped_[row] = true; }
    bool dropped(std::int64_t row) const { return dropped_[row]; }

  private:
    const FlatWanted wanted_;
    std::vector<std::atomic<float>> best_;  // the largest q.k so far, or the k-th largest
    std::vector<std::uint8_t> dropped_;
    std::vector<std::vector<float>> top_;  // heaps
    std::unique_ptr<std::mutex[]> locks_;
};

}  // namespace kvdb::indexes
