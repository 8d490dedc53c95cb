// Reads the pages of one KV head in one segment that some row needs, and scores their tokens.
#pragma once

#include <vector>

#include "paged_memory.h"
#include "search_state.h"

namespace kvdb::indexes::coarse {

struct Candidate {
    std::uint32_t key;  // item * rows + row of the tile
    std::int32_t id;
    float score;
};

// One item after the other, by one thread, in memory that stays.
class PageReader {
  public:
    // Adds the tokens that reach a row's threshold to `candidates`, and the mass of the others to
    // the item's sums.
    // Returns how many tokens were read.
    std::int64_t read(SearchState& state, const SegmentHead& item,
                      std::vector<Candidate>& candidates);

    // Asks for the keys that `read` will read.
    void ask(const SearchState& state, const SegmentHead& item, AskedRows& asked);

    // What was read of the last item.
    std::vector<std::int32_t> pages;  // that were read
    std::vector<float>
        page_weights;  // [rows][pages] of tokens that are no candidates, for the tail

  private:
    struct Chunk {
        const std::int32_t* ids;
        const std::uint16_t* page_of;  // of each, for the tail
        float* scores;                 // of one row; -inf afterwards where it does not see
        std::int64_t count;
    };

    void select(const SearchState& state, const SegmentHead& item);
    void select_for(const SearchState& state, const SegmentHead& item, int r);
    void mark(const PageSet& set, std::int64_t page);
    void collect(const SearchState& state, const SegmentHead& item);
    void score(SearchState& state, const SegmentHead& item, std::vector<Candidate>& candidates);
    void reuse(SearchState& state, const SegmentHead& item, std::vector<Candidate>& candidates);
    void sift(SearchState& state, const SegmentHead& item, int r, const Chunk& chunk,
              std::vector<Candidate>& candidates);

    std::vector<std::uint8_t> selected_;                         // [pages]
    std::int64_t members_ = 0;                                   // of the pages that are
    std::vector<std::uint64_t> tokens_;                          // a bit for each
    std::vector<std::int32_t> ids_;                              // to be scored
    std::vector<std::int32_t> reused_;                           // that were scored for thresholds
    std::vector<std::uint16_t> pages_of_ids_, pages_of_reused_;  // for the tail
    std::vector<float> scores_;                                  // [rows][chunk], or [rows][reused]
    std::vector<std::uint16_t> page_of_;                         // [tokens], for the tail
};

}  // namespace kvdb::indexes::coarse
