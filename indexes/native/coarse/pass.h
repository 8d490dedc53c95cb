// One pass of a tile of queries over all pages: scan, thresholds, read.
#pragma once

#include <vector>

#include "items.h"
#include "reading.h"

namespace kvdb::indexes {

class Pass {
  public:
    Pass(const Blocks& blocks, const std::vector<Segment>& segments, const QueryRows& queries,
         const CoarseOptions& options, const Tile& tile)
        : items(blocks, segments, queries, options, tile) {}

    void run();

    // After run().
    Items items;
    std::vector<std::vector<Hit>> hits;  // of each thread
    std::vector<float> tails;            // [items][rows][head_dim] or empty
    std::vector<std::int64_t> read;      // [items] tokens

  private:
    void scan(std::int64_t number);
    void give_up_all();
    std::vector<ScanRow> scan_rows(const Item& item) const;
    void read_item(std::int64_t number, std::vector<Hit>& out);
};

}  // namespace kvdb::indexes
