// The mass of what was not read of one item, estimated and bounded, and its attention.
#pragma once

#include <vector>

#include "search_state.h"

namespace kvdb::indexes::coarse {

class MissedMass {
  public:
    // Adds the mass of all pages but those that were read to the item's sums. weights:
    // [rows][pages] or empty: of tokens that were read and not retrieved; those of the other pages
    // are added.
    void add_unread(SearchState& state, const SegmentHead& item,
                    const std::vector<std::int32_t>& read, std::vector<float>& weights);

    // Adds, to out [rows][head_dim], each page's mean value times its weights, which are lost.
    void add_tail(const SearchState& state, const SegmentHead& item, std::vector<float>& weights,
                  float* out);

  private:
    void add_partly_seen(const SearchState& state, const SegmentHead& item, std::int64_t i,
                         float* weights, float* out);

    std::vector<float> unread_;  // [pages] visible tokens of pages that were not read
    std::vector<float> value_;   // [head_dim]
    std::vector<float> shares_;  // [rows]
};

}  // namespace kvdb::indexes::coarse
