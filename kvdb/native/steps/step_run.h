// One step under way. What is read whole comes first, then one search after the other, then the
// merges; the searches are left to whoever has the step, who may answer those of several at once.
#pragma once

#include <optional>
#include <vector>

#include "step_states.h"

namespace kvdb {

class StepRun {
  public:
    StepRun(const StepPlan& plan, const StepCall& call);

    // Reads the window. Where a number is not finite, there is nothing to search.
    void begin();

    // The next search, null where there is none.
    const StepSearch* next() const {
        return finite_ && searched_ < plan_.searches.size() ? &plan_.searches[searched_] : nullptr;
    }
    // What the next search is asked.
    const float* query() const { return asked_.data(); }         // [q_heads][head_dim], float32
    const float* floor() const { return floor_.data(); }         // [q_heads] the largest q.k so far
    const float* outside() const { return window_.lse.data(); }  // [q_heads]
    // The answer of the next search, which took so long. Where every row is given up, it was the
    // last.
    void take(indexes::SearchResult found, std::int64_t ns);

    // Merges everything. Comes last.
    StepResult finish();

  private:
    StepResult ended(StepEnd end);
    void turn_query();
    void count(bool answered);
    Rows rows_of(float* data) const { return {data, dim_, dim_}; }
    void give_up_where_many_are_found();
    // shown: whether an observed query shows it.
    void give_up(const std::vector<std::uint8_t>& heads, bool shown);
    std::vector<std::uint8_t> dense_heads(const indexes::SearchResult& result) const;
    bool attend_found();
    void attend_one(std::size_t i, const std::vector<std::uint8_t>& dense);
    void read_whole(const StepBlocks& blocks, const std::vector<std::uint8_t>& heads);
    std::vector<std::uint8_t> unguarded() const;
    std::vector<float> signs() const;
    std::vector<std::uint8_t> unlike() const;
    bool given_up(std::int64_t row) const;
    bool merge_estimates();

    const StepPlan& plan_;
    const StepCall& call_;
    const int heads_, group_;
    const std::int64_t rows_;
    const int dim_, value_dim_;
    States window_, state_;
    std::vector<float> query_, asked_, floor_, missed_, bound_;
    std::size_t searched_ = 0;
    bool finite_ = false, gave_up_ = false;
    std::int64_t window_tokens_ = 0, attended_ = 0;  // attended: found ones, over all rows
    double whole_ = 0;                               // searched tokens that were read whole
    std::int64_t window_bytes_ = 0;                  // of the tokens of the window
    double whole_bytes_ = 0;                         // of those read whole
    StepResult result_;
};

}  // namespace kvdb
