// Computes the data of each page from its keys.
#pragma once

#include <vector>

#include "pages.h"

namespace kvdb::indexes::coarse {

// Keys and values of one KV head in one segment, widened to float32; keys minus their mean.
struct SegmentKeys {
    std::int64_t tokens;
    int head_dim;
    std::vector<float> keys;  // [tokens][head_dim]
    std::vector<float> shift;

    SegmentKeys(const Blocks& blocks, int kv_head, std::int64_t begin, std::int64_t tokens);
    const float* key(std::int64_t t) const { return keys.data() + t * head_dim; }
};

// Fills `set`, whose `first` and `members` are given.
void represent(const Blocks& blocks, const Pages& pages, std::int64_t segment, int kv_head,
               const SegmentKeys& keys, const PageSet& set);

}  // namespace kvdb::indexes::coarse
