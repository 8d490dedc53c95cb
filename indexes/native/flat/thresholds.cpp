#include "thresholds.h"

#include <algorithm>
#include <functional>

namespace kvdb::indexes::flat {

Thresholds::Thresholds(const FlatOptions& options, std::int64_t rows, const float* floor)
    : options_(options), best_(rows), dropped_(rows) {
    for (std::int64_t r = 0; r < rows; ++r) best_[r] = by_rank() ? -INFINITY : floor[r];
    if (!by_rank()) return;
    top_.resize(rows);
    locks_ = std::make_unique<std::mutex[]>(rows);
}

void Thresholds::rank(std::int64_t row, const float* scores, std::int64_t count) {
    const std::lock_guard lock(locks_[row]);
    std::vector<float>& top = top_[row];
    for (const float* score = scores; score != scores + count; ++score) {
        const bool full = static_cast<std::int64_t>(top.size()) >= options_.k;
        if (full && !(*score > top.front())) continue;
        if (full) {
            std::pop_heap(top.begin(), top.end(), std::greater<>());
            top.pop_back();
        }
        top.push_back(*score);
        std::push_heap(top.begin(), top.end(), std::greater<>());
    }
    if (static_cast<std::int64_t>(top.size()) >= options_.k) raise(row, top.front());
}

}  // namespace kvdb::indexes::flat
