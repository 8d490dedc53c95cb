// The mass of the tokens of one item that were not read, estimated and bounded, and the attention
// over them.
#pragma once

#include <vector>

#include "search_state.h"

namespace kvdb::indexes::coarse {

class MissedMass {
  public:
    // Adds the mass of all pages that were not read to the item's sums. weights: [rows][pages] or
    // empty; it comes with the weights of tokens that were read but not retrieved, and the weights
    // of the unread pages are added.
    void add_unread(SearchState& state, const SegmentHead& item,
                    const std::vector<std::int32_t>& read, std::vector<float>& weights);

    // Adds, to out [rows][value_dim], each page's mean value times its weights, which are lost.
    void add_tail(const SearchState& state, const SegmentHead& item, std::vector<float>& weights,
                  float* out);

  private:
    void add_partly_seen(const SearchState& state, const SegmentHead& item, std::int64_t i,
                         float* weights, float* out);

    std::vector<float> unread_;  // [pages] visible tokens of pages that were not read
    std::vector<float> value_;   // [value_dim]
    std::vector<float> shares_;  // [rows]
};

}  // namespace kvdb::indexes::coarse
