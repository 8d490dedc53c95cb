// Cuts what several searches found down to the tokens that count once all of them were made.
#pragma once

#include <vector>

#include "step.h"

namespace kvdb {

// found: of each search of the plan. floor: [q_heads] the largest q.k of all. The mass of what is
// left out counts as missed. Searches that estimate what they do not find stay as they are, because
// a found token is better than its estimate.
void cut_found(const StepPlan& plan, const std::vector<float>& floor,
               std::vector<indexes::SearchResult>& found);

}  // namespace kvdb
