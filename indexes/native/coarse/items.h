// What the steps of one pass share: its items, and what is known and decided of each row.
#pragma once

#include <limits>
#include <vector>

#include "scored.h"
#include "tile.h"

namespace kvdb::indexes {

// The log2 of a sum of powers of 2; -inf for none.
struct LogSum {
    double exponent = 0, sum = 0;
    void add(double other_exponent, double other_sum);
    double log2() const;
};

// What one item leaves for each row.
struct RowSums {
    float top;             // what no score exceeds
    float curve;           // of MassItem, for the estimate
    LogSum missed, bound;  // of the pages that were not read
    LogSum turned_down;    // of the tokens that were read and are no hits
    double tail_weight = 0;
};

struct PageOf {
    std::size_t segment = 0;
    std::int64_t page = -1;  // none
};

// What is decided of a row before its keys are read.
struct RowPlan {
    float threshold = -std::numeric_limits<float>::infinity();       // of scores
    float page_threshold = -std::numeric_limits<float>::infinity();  // of priorities
    float margin;                                                    // of a page's reach
    PageOf seed;           // where the maximum was found: read in any case
    double reference = 0;  // of tail weights, as an exponent of 2
};

// A KV head in one segment.
struct Item {
    std::int64_t number;
    const Segment& segment;
    int kv_head;
    PageSet set;
    Tile::View view;
    Visibility visible;
};

class Items {
  public:
    Items(const Blocks& blocks, const std::vector<Segment>& segments, const QueryRows& queries,
          const CoarseOptions& options, const Tile& tile);

    const Blocks& blocks;
    const std::vector<Segment>& segments;
    const QueryRows& queries;
    const CoarseOptions& options;
    const Tile& tile;
    const int kv_heads, rows, head_dim;
    const float factor;               // scores to exponents of 2
    const std::vector<int> asked;     // KV heads whose rows are to be answered
    std::vector<RowPlan> plans;       // [kv_heads][rows]
    std::vector<RowSums> sums;        // [count()][rows]
    std::vector<std::uint8_t> dense;  // [kv_heads] not 0 where no row is answered
    std::vector<ScoredPages> scored;  // [kv_heads]

    std::int64_t count() const { return std::int64_t(segments.size()) * kv_heads; }
    // Of these, those of KV heads that are asked, and the number of each among all.
    std::int64_t asked_count() const { return std::int64_t(segments.size() * asked.size()); }
    std::int64_t asked_item(std::int64_t i) const {
        const auto heads = std::int64_t(asked.size());
        return i / heads * kv_heads + asked[i % heads];
    }
    Item at(std::int64_t number) const;
    Item at(std::size_t segment, int kv_head) const {
        return at(std::int64_t(segment) * kv_heads + kv_head);
    }
    RowPlan& plan(int kv_head, int r) { return plans[std::size_t(kv_head) * rows + r]; }
    const RowPlan& plan(int kv_head, int r) const { return plans[std::size_t(kv_head) * rows + r]; }
    RowSums& sum(const Item& item, int r) { return sums[item.number * rows + r]; }
    const RowSums& sum(const Item& item, int r) const { return sums[item.number * rows + r]; }
    // Visible tokens of each page.
    const float* counts(const Tile::View& view, int r) const {
        return view.counts + r % tile.n * view.pages;
    }
    // The score of which a page's tokens have the mass, as the estimate has it.
    float likely(const Item& item, int r, std::int64_t page) const;
    // Adds the page's tokens that query i sees.
    void members(const Item& item, std::int64_t page, std::int64_t i,
                 std::vector<std::int32_t>& tokens) const;
    // Adds those that any query of the tile may see.
    void members(const Item& item, std::int64_t page, std::vector<std::int32_t>& tokens) const;
    // Exact scores of tokens.
    std::vector<float> scores_of(int kv_head, int r, const std::vector<std::int32_t>& tokens) const;
    // Of tokens, for all rows of a KV head, scores [rows][stride].
    void score_all(int kv_head, const std::int32_t* tokens, std::int64_t count, float* scores,
                   std::int64_t stride) const;
};

}  // namespace kvdb::indexes
