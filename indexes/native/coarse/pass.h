// One pass of a tile of queries over all pages: scan, threshold, read.
#pragma once

#include <vector>

#include "../score/kernels.h"
#include "tile.h"

namespace kvdb::indexes {

struct Hit {
    std::uint32_t key;  // item * rows + row of the tile
    std::int32_t id;
    float score;
};

// The log2 of a sum of powers of 2; -inf for none.
struct LogSum {
    double exponent = 0, sum = 0;
    void add(double other_exponent, double other_sum);
    double log2() const;
};

// What one item, a KV head in one segment, leaves for each row.
struct RowSums {
    float top;             // what no score exceeds
    float curve;           // of MassItem, for the estimate
    LogSum missed, bound;  // of the pages that were not read
    LogSum turned_down;    // of the tokens that were read and are no hits
    double tail_weight = 0;
};

class Pass {
  public:
    Pass(const Blocks& blocks, const std::vector<Segment>& segments, const QueryRows& queries,
         const CoarseOptions& options, Tile& tile);

    void run();

    // After run(): of each row of the tile, [kv_heads][rows].
    std::vector<float> thresholds;       // what was turned down lies below
    std::vector<double> references;      // of tail weights, as exponents of 2
    std::vector<std::vector<Hit>> hits;  // of each thread
    std::vector<RowSums> sums;           // [items][rows]
    std::vector<float> tails;            // [items][rows][head_dim] or empty
    std::vector<std::int64_t> read;      // [items] tokens

    std::int64_t items() const { return std::int64_t(segments_.size()) * kv_heads_; }

  private:
    struct Item {
        const Segment& segment;
        int kv_head;
        PageSet set;
        Tile::View view;
        Visibility visible;
    };
    struct Scratch;
    struct Seed {
        std::size_t segment = 0;
        std::int64_t page = -1;
    };

    Item item(std::int64_t number) const;
    void scan(std::int64_t number);
    void find_threshold(int kv_head);
    void narrow(int kv_head, int r);
    bool excessive(int kv_head, int r, float margin) const;
    float margin(int kv_head, int r) const { return margins_[std::size_t(kv_head) * rows_ + r]; }
    float range_threshold(int kv_head, int r);
    float top_k_threshold(int kv_head, int r);
    float top_p_threshold(int kv_head, int r) const;
    void read_item(std::int64_t number, std::vector<Hit>& out);
    bool select(const Item& item, Scratch& scratch) const;
    void collect(const Item& item, Scratch& scratch) const;
    void score(const Item& item, Scratch& scratch, std::int64_t number, std::vector<Hit>& out);
    void weigh(const Item& item, Scratch& scratch, std::int64_t number);
    void weigh_tail(const Item& item, Scratch& scratch, std::int64_t number);
    void add_page_value(const Item& item, std::int64_t page, std::int64_t i, float weight,
                        float* out) const;
    double variance(const Item& item, int r) const;
    float likely(const Item& item, int r, std::int64_t page) const;
    std::vector<float> scores_of(int kv_head, int r, const std::vector<std::int32_t>& tokens) const;
    void members(const Item& item, std::int64_t page, std::int64_t i,
                 std::vector<std::int32_t>& tokens) const;

    const Blocks& blocks_;
    const std::vector<Segment>& segments_;
    const QueryRows& queries_;
    const CoarseOptions& options_;
    Tile& tile_;
    int kv_heads_, rows_, d_;
    float factor_;                        // scores to exponents of 2
    std::vector<float> page_thresholds_;  // pages of a lower priority are not read
    std::vector<Seed> seeds_;             // [kv_heads][rows] the page where the maximum was found
    std::vector<float> margins_;          // [kv_heads][rows] of a page's reach
};

}  // namespace kvdb::indexes
