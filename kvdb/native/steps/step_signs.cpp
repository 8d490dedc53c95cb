#include <algorithm>
#include <cmath>

#include "step_run.h"

namespace kvdb {
namespace {

// A sign that can be compared, whatever it was.
float sign_of(float x) {
    constexpr float kMost = 1e4f;
    return std::isnan(x) ? kMost : std::clamp(x, -kMost, kMost);
}

}  // namespace

// Whether all searches for a row gave it up, so that it is read whole.
bool StepRun::given_up(std::int64_t row) const {
    for (std::size_t i = 0; i < result_.found.size(); ++i) {
        const std::vector<std::uint8_t>& active = plan_.searches[i].active_heads;
        const bool asked = active.empty() || active[row / group_];
        if (asked && !result_.found[i].dense[row]) return false;
    }
    return true;
}

std::vector<float> StepRun::signs() const {
    std::vector<float> signs(kSigns * rows_, NAN);
    for (std::int64_t row = 0; row < rows_; ++row) {
        if (given_up(row)) continue;
        double square = 0;
        for (int i = 0; i < dim_; ++i) {
            square += static_cast<double>(query_[row * dim_ + i]) * query_[row * dim_ + i];
        }
        signs[row] = sign_of(static_cast<float>(0.5 * std::log(square)));
        signs[rows_ + row] = sign_of(state_.lse[row]);
        signs[2 * rows_ + row] = sign_of(bound_[row] - state_.lse[row]);
        signs[3 * rows_ + row] = sign_of(plan_.scale * floor_[row]);
    }
    return signs;
}

// The KV heads of which some sign is outside of its range. What is no number is in every range.
std::vector<std::uint8_t> StepRun::unlike() const {
    std::vector<std::uint8_t> heads(heads_);
    const std::size_t n = plan_.ranges.size() / 2;
    for (std::size_t i = 0; i < n; ++i) {
        const bool outside =
            result_.signs[i] < plan_.ranges[i] || result_.signs[i] > plan_.ranges[n + i];
        heads[i % rows_ / group_] |= static_cast<std::uint8_t>(outside);
    }
    return heads;
}

}  // namespace kvdb
