#include "observe.h"

#include <algorithm>
#include <cmath>

namespace kvdb {
namespace {

constexpr int kLanes = 16;  // enough independent maxima to keep any vector unit busy

}  // namespace

void raise_top(const RetrievedRows& retrieved, float* top) {
    for (std::int64_t row = 0; row < retrieved.rows; ++row) {
        const float* score = retrieved.scores + retrieved.offsets[row];
        const float* end = retrieved.scores + retrieved.offsets[row + 1];
        float lanes[kLanes];
        std::fill(lanes, lanes + kLanes, top[row]);
        for (; end - score >= kLanes; score += kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) {
                lanes[lane] = std::max(lanes[lane], score[lane]);
            }
        }
        for (; score < end; ++score) lanes[0] = std::max(lanes[0], *score);
        const bool left = retrieved.dense && retrieved.dense[row] != 0;
        top[row] = left ? INFINITY : *std::max_element(lanes, lanes + kLanes);
    }
}

bool observe(const ObserveCall& call) {
    const std::int64_t rows = call.retrieved.rows, group = rows / call.kv_heads;
    bool all = true;
    for (std::int64_t row = 0; row < rows; ++row) {
        const bool active_heads = !call.active_heads || call.active_heads[row / group] != 0;
        const bool dense = call.retrieved.dense && call.retrieved.dense[row] != 0;
        const bool known = std::isfinite(call.top[row]);
        const auto count = double(call.retrieved.offsets[row + 1] - call.retrieved.offsets[row]);
        const float logit = known ? call.scale * call.top[row] - call.lse[row] : -INFINITY;
        const float values[] = {dense ? 1.0F : float(count / call.tokens), float(dense),
                                std::exp(std::min(logit, 0.0F)),
                                float(known && call.window[row] >= call.top[row])};
        const bool seen[] = {active_heads, active_heads, active_heads && known,
                             active_heads && known};
        for (int measure = 0; measure < 4; ++measure) {
            call.values[measure * rows + row] = values[measure];
            call.seen[measure * rows + row] = seen[measure];
            all = all && seen[measure];
        }
    }
    return all;
}

}  // namespace kvdb
