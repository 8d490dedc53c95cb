#include "observe.h"

#include <algorithm>
#include <cmath>

namespace kvdb {
namespace {

constexpr int kLanes = 16;  // so many maxima at a time keep any vector unit busy

}  // namespace

void raise_top(const FoundRows& found, float* top) {
    for (std::int64_t row = 0; row < found.rows; ++row) {
        const float* score = found.scores + found.offsets[row];
        const float* end = found.scores + found.offsets[row + 1];
        float lanes[kLanes];
        std::fill(lanes, lanes + kLanes, top[row]);
        for (; end - score >= kLanes; score += kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) {
                lanes[lane] = std::max(lanes[lane], score[lane]);
            }
        }
        for (; score < end; ++score) lanes[0] = std::max(lanes[0], *score);
        const bool left = found.dense && found.dense[row];
        top[row] = left ? INFINITY : *std::max_element(lanes, lanes + kLanes);
    }
}

bool observe(const ObserveCall& call) {
    const std::int64_t rows = call.found.rows, group = rows / call.kv_heads;
    bool all = true;
    for (std::int64_t row = 0; row < rows; ++row) {
        const bool asked = !call.asked || call.asked[row / group];
        const bool dense = call.found.dense && call.found.dense[row];
        const bool known = std::isfinite(call.top[row]);
        const auto count = double(call.found.offsets[row + 1] - call.found.offsets[row]);
        const float logit = known ? call.scale * call.top[row] - call.lse[row] : -INFINITY;
        const float values[] = {dense ? 1.0F : float(count / call.tokens), float(dense),
                                std::exp(std::min(logit, 0.0F)),
                                float(known && call.window[row] >= call.top[row])};
        const bool seen[] = {asked, asked, asked && known, asked && known};
        for (int measure = 0; measure < 4; ++measure) {
            call.values[measure * rows + row] = values[measure];
            call.seen[measure * rows + row] = seen[measure];
            all = all && seen[measure];
        }
    }
    return all;
}

}  // namespace kvdb
