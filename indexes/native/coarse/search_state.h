// The state that the steps of one tile search share: its items, and what is known and decided about
// each row.
#pragma once

#include <limits>
#include <vector>

#include "scored_pages.h"
#include "tile.h"

namespace kvdb::indexes::coarse {

// The log2 of a sum of powers of 2: -inf for none, +inf where a term is infinite or not a number.
struct LogSum {
    double exponent = 0, sum = 0;
    void add(double other_exponent, double other_sum);
    double log2() const;
};

// The sums that one item leaves for each row.
struct RowSums {
    // Makes 2^exponent the unit of the tail, if it is larger than the one before: `weights` [count]
    // and their sum are rescaled.
    void raise_tail_reference(double exponent, float* weights, std::int64_t count);

    float top;             // what no score exceeds
    float curve;           // of MassItem, for the estimate
    double spread = 0;     // the variance of a page's scores, in exponents of e
    LogSum missed, bound;  // of the pages that were not read
    LogSum dropped;        // of the tokens that were read and are no candidates
    // The weights of the tail are in units of 2^tail_reference, which is near the largest of them.
    double tail_reference = -std::numeric_limits<double>::infinity();
    double tail_weight = 0;
};

struct PageRef {
    std::size_t segment = 0;
    std::int64_t page = -1;  // none
};

// Decided for a row before its keys are read.
struct RowPlan {
    float threshold = -std::numeric_limits<float>::infinity();       // of scores
    float page_threshold = -std::numeric_limits<float>::infinity();  // of priorities
    float margin;                                                    // of a page's reach
    PageRef seed;  // where the maximum is: read in any case
};

// A KV head in one segment: one work item.
struct SegmentHead {
    std::int64_t number;
    const Segment& segment;
    int kv_head;
    PageSet set;
    Tile::View view;
    Visibility visible;
};

class SearchState {
  public:
    SearchState(const Blocks& blocks, const std::vector<Segment>& segments,
                const QueryRows& queries, const CoarseOptions& options, const Tile& tile);

    const Blocks& blocks;
    const std::vector<Segment>& segments;
    const QueryRows& queries;
    const CoarseOptions& options;
    const Tile& tile;
    const int kv_heads, rows, head_dim, value_dim;
    const float factor;               // scores to exponents of 2
    const std::vector<int> active;    // KV heads whose rows are to be answered
    std::vector<RowPlan> plans;       // [kv_heads][rows]
    std::vector<RowSums> sums;        // [count()][rows]
    std::vector<std::uint8_t> dense;  // [kv_heads] not 0 where no row is answered
    std::vector<ScoredPages> scored;  // [kv_heads]

    std::int64_t count() const { return std::int64_t(segments.size()) * kv_heads; }
    // The items of active KV heads, and the number of each among all.
    std::int64_t active_count() const { return std::int64_t(segments.size() * active.size()); }
    std::int64_t active_item(std::int64_t i) const {
        const auto heads = std::int64_t(active.size());
        return i / heads * kv_heads + active[i % heads];
    }
    SegmentHead at(std::int64_t number) const;
    SegmentHead at(std::size_t segment, int kv_head) const {
        return at(std::int64_t(segment) * kv_heads + kv_head);
    }
    RowPlan& plan(int kv_head, int r) { return plans[std::size_t(kv_head) * rows + r]; }
    const RowPlan& plan(int kv_head, int r) const { return plans[std::size_t(kv_head) * rows + r]; }
    RowSums& sum(const SegmentHead& item, int r) { return sums[item.number * rows + r]; }
    const RowSums& sum(const SegmentHead& item, int r) const {
        return sums[item.number * rows + r];
    }
    // Visible tokens of each page.
    const float* counts(const Tile::View& view, int r) const {
        return view.counts + r % tile.n * view.pages;
    }
    // Adds the page's tokens that query i sees.
    void members(const SegmentHead& item, std::int64_t page, std::int64_t i,
                 std::vector<std::int32_t>& tokens) const;
    // Adds those that any query of the tile may see.
    void members(const SegmentHead& item, std::int64_t page,
                 std::vector<std::int32_t>& tokens) const;
    // Exact scores of tokens.
    std::vector<float> scores_of(int kv_head, int r, const std::vector<std::int32_t>& tokens) const;
    // Scores tokens for all rows of a KV head: scores [rows][stride].
    void score_all(int kv_head, const std::int32_t* tokens, std::int64_t count, float* scores,
                   std::int64_t stride) const;
};

}  // namespace kvdb::indexes::coarse
