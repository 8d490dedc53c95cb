// The search of one tile of queries over all pages: score pages, find thresholds, read pages.
#pragma once

#include <vector>

#include "cache_line.h"
#include "page_reader.h"
#include "search_state.h"

namespace kvdb::indexes::coarse {

class TileSearch {
  public:
    TileSearch(const Blocks& blocks, const std::vector<Segment>& segments, const QueryRows& queries,
               const CoarseOptions& options, const Tile& tile)
        : state(blocks, segments, queries, options, tile) {}

    void run();

    // After run().
    SearchState state;
    std::vector<Apart<std::vector<Candidate>>> candidates;  // of each thread
    std::vector<float> tails;                               // [items][rows][value_dim] or empty
    std::vector<std::int64_t> read;                         // [items] tokens

  private:
    void scan(std::int64_t number);
    template <class Ask>
    void ask(std::int64_t count, const Ask& ask) const;
    void give_up_all();
    std::vector<ScanRow> scan_rows(const SegmentHead& item) const;
    void ask_item(std::int64_t number, AskedRows& asked) const;
    void read_item(std::int64_t number, std::vector<Candidate>& out);
};

}  // namespace kvdb::indexes::coarse
