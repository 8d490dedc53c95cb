// Weighs what was not read of one item: its mass, estimated and bounded, and its attention.
#pragma once

#include <vector>

#include "items.h"

namespace kvdb::indexes {

class Weighing {
  public:
    // Adds the mass of all pages but those that were read to the item's sums.
    void weigh(Items& items, const Item& item, const std::vector<std::int32_t>& read);

    // Adds, to the sums and to out [rows][head_dim], the weight of each page's tokens that were not
    // found times its mean value. weights: [rows][pages] of tokens that were read and not found.
    void weigh_tail(Items& items, const Item& item, const std::vector<std::int32_t>& read,
                    const std::vector<float>& weights, float* out);

  private:
    void add_page_value(const Items& items, const Item& item, std::int64_t page, int r,
                        float weight, float* out);

    std::vector<float> unread_;  // [pages] visible tokens of pages that were not read
    std::vector<std::int32_t> tokens_;
    std::vector<float> value_;
};

}  // namespace kvdb::indexes
