// A beam search over the graph of one KV head, for the query heads of one query.
#pragma once

#include <cstdint>
#include <vector>

#include "quantized_queries.h"
#include "query_group.h"
#include "range.h"
#include "visited.h"

namespace kvdb::indexes::graph {

// DIPRS, AlayaDB (arXiv 2504.10326), algorithm 1, in two forms. Listed, as in the paper: candidates
// are expanded in the order in which they were met, and accepted while they are in range of the
// best one or the list is short. Best first: the token furthest within the range of any of the
// query heads is expanded next, the range begins at the floor, and steps outside of it are counted.
//
// Hidden tokens are expanded like others, but are neither retrieved nor count as the best. Where
// most of a token's neighbours are hidden, the neighbours' neighbours are scored too.
class BeamSearch {
  public:
    // Answers the rows of the group; `out` has `heads` of them.
    void run(const QueryGroup& group, RowResult* out);

    std::int64_t scanned() const { return scanned_; }
    std::int64_t nbytes() const { return nbytes_; }

  private:
    struct FrontierToken {
        float margin, score;
        std::uint32_t token;
        std::uint32_t row;
        bool operator<(const FrontierToken& other) const { return margin < other.margin; }
    };

    void begin();
    void make_room(std::int64_t count);
    void estimate_in_order(const std::uint8_t* codes, std::int64_t count, float* out,
                           std::int64_t out_stride);
    void estimate(const std::vector<std::uint32_t>& tokens);
    void score_outliers();
    void score_near_outliers(std::int64_t r, std::int64_t count);
    void score_probes();
    void seed_frontier();
    void seed_row(std::int64_t r);
    void search_best_first();
    void search_listed();
    void scan();
    void expand(std::uint32_t token);
    void expand_hidden(std::uint32_t token);
    void visit(std::uint32_t token);
    void score_fresh();
    void push(std::uint32_t token, std::int64_t at);
    void push_frontier(float margin, float score, std::uint32_t token, std::int64_t r);
    const float* measure_margins(std::int64_t count);
    void check_density(std::int64_t r);
    void stop();

    float score_at(std::int64_t r, std::int64_t at) const { return scores_[r * room_ + at]; }
    float* probe_scores(std::int64_t r) { return probe_scores_.data() + r * group_->probes.count; }

    const QueryGroup* group_ = nullptr;
    bool selective_;  // so many tokens are hidden that they stand in the way
    std::int64_t budget_, scanned_, nbytes_;
    QuantizedQueries quantized_;
    Visited visited_;
    std::vector<Range> ranges_;            // of each row
    std::vector<FrontierToken> frontier_;  // a heap
    std::vector<std::uint32_t> list_, fresh_, hidden_, unmet_;
    std::vector<float> scores_, probe_scores_, rest_, margins_;
    std::vector<float> outlier_scores_, exact_;
    std::vector<std::int32_t> near_outliers_;
    std::int64_t room_ = 0, probes_seen_ = 0;
};

}  // namespace kvdb::indexes::graph
