// What an observed query of a step showed of the indexes that it searched.
#pragma once

#include <vector>

#include "step.h"

namespace kvdb {

struct StepObservation {
    std::size_t search;              // its number in the plan
    std::vector<float> values;       // [4][q_heads], see `observe`
    std::vector<std::uint8_t> seen;  // the same: which values are known; empty for all
};

// Of each search that is told, if the query was observed. top, lse: [q_heads] the largest q.k and
// the log of the sum of exp(scale * q.k) over everything, as far as they are known; null for the
// `top` of what was read and found.
std::vector<StepObservation> observations(const StepPlan& plan, const StepResult& result,
                                          const float* top, const float* lse);

}  // namespace kvdb
