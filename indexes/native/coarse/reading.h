// Reads the pages of one item that some row needs, and scores their tokens.
#pragma once

#include <vector>

#include "items.h"

namespace kvdb::indexes {

struct Hit {
    std::uint32_t key;  // item * rows + row of the tile
    std::int32_t id;
    float score;
};

// One item after the other, by one thread, in memory that stays.
class Reading {
  public:
    // Adds what the item's rows want to `hits`, and the mass of what they do not to its sums.
    // Returns how many tokens were read.
    std::int64_t read(Items& items, const Item& item, std::vector<Hit>& hits);

    // Of the last item.
    std::vector<std::int32_t> pages;  // that were read
    std::vector<float> page_weights;  // [rows][pages] of tokens that are no hits, for the tail

  private:
    struct Chunk {
        const std::int32_t* ids;
        const std::uint16_t* page_of;  // of each, for the tail
        float* scores;                 // of one row; -inf afterwards where it does not see
        std::int64_t count;
    };

    void select(const Items& items, const Item& item);
    void select_for(const Items& items, const Item& item, int r);
    void mark(const PageSet& set, std::int64_t page);
    void collect(const Items& items, const Item& item);
    void score(Items& items, const Item& item, std::vector<Hit>& hits);
    void reuse(Items& items, const Item& item, std::vector<Hit>& hits);
    void sift(Items& items, const Item& item, int r, const Chunk& chunk, std::vector<Hit>& hits);

    std::vector<std::uint8_t> selected_;                         // [pages]
    std::int64_t members_ = 0;                                   // of the pages that are
    std::vector<std::uint64_t> tokens_;                          // a bit for each
    std::vector<std::int32_t> ids_;                              // to be scored
    std::vector<std::int32_t> reused_;                           // that were scored for thresholds
    std::vector<std::uint16_t> pages_of_ids_, pages_of_reused_;  // for the tail
    std::vector<float> scores_;                                  // [rows][chunk], or [rows][reused]
    std::vector<std::uint16_t> page_of_;                         // [tokens], for the tail
};

}  // namespace kvdb::indexes
