// Weighs what was not read of one item: its mass, estimated and bounded, and its attention.
#pragma once

#include <vector>

#include "items.h"

namespace kvdb::indexes {

class Weighing {
  public:
    // Adds the mass of all pages but those that were read to the item's sums. weights:
    // [rows][pages] or empty: of tokens that were read and not found; those of the other pages are
    // added.
    void weigh(Items& items, const Item& item, const std::vector<std::int32_t>& read,
               std::vector<float>& weights);

    // Adds, to out [rows][head_dim], each page's mean value times its weights, which are lost.
    void weigh_values(const Items& items, const Item& item, std::vector<float>& weights,
                      float* out);

  private:
    void weigh_partly_seen(const Items& items, const Item& item, std::int64_t i, float* weights,
                           float* out);

    std::vector<float> unread_;  // [pages] visible tokens of pages that were not read
    std::vector<float> value_;   // [head_dim]
    std::vector<float> shares_;  // [rows]
};

}  // namespace kvdb::indexes
