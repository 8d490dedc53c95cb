// What searches found, cut down to what counts.
#pragma once

#include <vector>

#include "step.h"

namespace kvdb {

// What several searches found, cut down to the tokens that count once all of them were made.
// found: of each search of the plan. floor: [q_heads] the largest q.k of all. The mass of what is
// left out counts as missed. Searches that estimate what they do not find stay as they are, because
// a found token is better than its estimate.
void cut_found(const StepPlan& plan, const std::vector<float>& floor,
               std::vector<indexes::SearchResult>& found);

// The result without the rows of some KV heads, which miss nothing. heads: [kv_heads]. group: the
// rows of a head.
indexes::SearchResult without_heads(const indexes::SearchResult& result,
                                    const std::vector<std::uint8_t>& heads, int group);

}  // namespace kvdb
