// One walk over the graph of one KV head, for the query heads of one query.
#pragma once

#include <cstdint>
#include <vector>

#include "graph.h"
#include "lens.h"
#include "visited.h"

namespace kvdb::indexes {

// DIPRS, AlayaDB (arXiv 2504.10326), algorithm 1, in two forms. Listed, as in the paper: candidates
// are expanded in the order in which they were met, and taken in while they are in range of the best
// one or the list is short. Best first: the one furthest within the range of any of the query heads
// is expanded next, the range begins at the floor, and steps outside of it are counted.
//
// Hidden tokens are walked through like others, but are neither found nor the best. Where most of a
// token's neighbours are hidden, theirs are looked at too.
class Walk {
  public:
    struct Item {
        int kv_head;
        std::int64_t query;  // of the batch
        int head, heads;     // of the group: [head, head + heads)
        std::int64_t visible;  // tokens the query sees
        const std::uint8_t* rows;  // or null: only those rows of the item that are set
    };

    // Answers the item's rows; `out` has `heads` of them.
    void run(const Graph& graph, const Probes& probes, const Blocks& blocks,
             const QueryRows& queries, const SearchOptions& options, const Item& item,
             RowFound* out);

    std::int64_t scanned() const { return scanned_; }
    std::int64_t nbytes() const { return nbytes_; }

  private:
    struct Candidate {
        float score;
        std::uint32_t token;
    };
    struct Step {
        float margin, score;
        std::uint32_t token;
        std::uint32_t row;
        bool operator<(const Step& other) const { return margin < other.margin; }
    };
    struct Row {
        float floor, best, seen;  // seen: the best, hidden ones included
        float limit;              // below it nothing is found any more
        float noise;
        int patience;
        bool dense, done;
        std::int64_t check;  // with so many candidates, look whether the range is too full
        std::vector<Candidate> found;
        std::vector<float> largest;  // of a search for k: a heap, the smallest on top
    };

    void begin(const Item& item);
    void estimate(const std::uint8_t* codes, const std::uint32_t* tokens, std::int64_t count);
    void start();
    void start_row(std::int64_t r, std::int64_t count);
    void outliers();
    void walk_best_first();
    void walk_listed();
    void scan();
    void expand(std::uint32_t token);
    void expand_hidden(std::uint32_t token);
    void take(std::uint32_t token);
    void meet();
    void push(std::uint32_t token, std::int64_t at);
    const float* measure_margins(std::int64_t count);
    float far_below(const Row& row) const;
    bool wants(const Step& step);
    void offer(Row& row, std::uint32_t token, float score);
    void raise(Row& row, float score);
    void check_density(Row& row, std::int64_t r);
    void stop();
    static void leave(Row& row);
    void compact(Row& row) const;
    void finish(std::int64_t r, RowFound& out);
    void rescore(std::int64_t r, RowFound& out);
    void keep_largest(std::int64_t r, RowFound& out);
    void bound_missed(std::int64_t r, RowFound& out) const;
    void estimate_missed(std::int64_t r, RowFound& out);

    bool visible(std::uint32_t token) const { return queries_->visible(item_.query, token); }
    const float* query(std::int64_t r) const;
    float score_at(std::int64_t r, std::int64_t at) const { return scores_[r * room_ + at]; }

    const Graph* graph_;
    const Probes* probes_;
    const Blocks* blocks_;
    const QueryRows* queries_;
    SearchOptions options_;
    Item item_;
    bool selective_;  // so much is hidden that it stands in the way
    std::int64_t width_, budget_, scanned_, nbytes_;
    Lens lens_;
    Visited visited_;
    std::vector<Row> rows_;
    std::vector<Step> steps_;  // a heap
    std::vector<std::uint32_t> list_, fresh_, hidden_;
    std::vector<float> scores_, probe_scores_, rest_, margins_;
    std::int64_t room_ = 0, probes_seen_ = 0;
};

}  // namespace kvdb::indexes
