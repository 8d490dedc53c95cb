// size: one class: a step while it runs.
#include "step_run.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "../pages/move.h"
#include "../pages/quantize.h"
#include "found_cut.h"
#include "observe.h"

namespace kvdb {
namespace {

using indexes::SearchResult;
constexpr float kNone = -INFINITY;

std::int64_t tokens_of(const StepBlocks& blocks) {
    return std::accumulate(blocks.counts.begin(), blocks.counts.end(), std::int64_t{0});
}

std::int64_t bytes_of(const StepPlan& plan, const StepBlocks& blocks) {
    const auto n = static_cast<std::int64_t>(blocks.table.size());
    return payload_bytes(plan.geometry, {blocks.table.data(), blocks.counts.data(), n});
}

void raise(const std::vector<float>& values, std::vector<float>& to) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], values[i]);
}

bool any_of(const std::vector<std::uint8_t>& heads) {
    return std::any_of(heads.begin(), heads.end(), [](std::uint8_t head) { return head != 0; });
}

}  // namespace

StepRun::StepRun(const StepPlan& plan, const StepCall& call)
    : plan_(plan),
      call_(call),
      heads_(plan.geometry.kv_heads),
      group_(plan.rows_of_head()),
      rows_(plan.q_heads),
      dim_(plan.geometry.head_dim),
      value_dim_(plan.geometry.value_dim),
      window_(rows_, value_dim_),
      state_(rows_, value_dim_),
      query_(rows_ * dim_),
      asked_(rows_ * dim_),
      floor_(rows_) {}

StepResult StepRun::ended(StepEnd end) {
    result_.end = end;
    count(end == StepEnd::answered);
    return std::move(result_);
}

// answered: whether what was read whole counts too.
void StepRun::count(bool answered) {
    const double read = answered ? static_cast<double>(window_tokens_) + whole_ : 0;
    result_.scanned = read;
    result_.retrieved = read + static_cast<double>(attended_) / static_cast<double>(rows_);
    result_.nbytes = answered ? window_bytes_ + std::llround(whole_bytes_) : 0;
    for (std::size_t i = 0; i < result_.found.size(); ++i) {
        const SearchResult& found = result_.found[i];
        const StepBlocks& blocks = plan_.searches[i].blocks;
        const auto format = static_cast<BlockFormat>(blocks.table[0] & kFormatMask);
        const auto values = static_cast<std::int64_t>(found.retrieved.ids.size());
        result_.scanned += static_cast<double>(found.scanned) / heads_;
        result_.nbytes += found.nbytes + values * value_bytes(plan_.geometry, format) / heads_;
    }
}

void StepRun::begin() {
    StepBlocks window = plan_.window;
    if (plan_.grows_from >= 0) {
        window.table.insert(window.table.end(), call_.table + plan_.grows_from,
                            call_.table + call_.blocks);
        window.counts.insert(window.counts.end(), call_.counts + plan_.grows_from,
                             call_.counts + call_.blocks);
    }
    shorten(window, call_.unseen);
    attend_blocks(plan_, call_.query, window, window_, floor_.data(), 0, heads_);
    window_tokens_ = tokens_of(window);
    window_bytes_ = bytes_of(plan_, window);
    if (!finite_or_none(window_.lse) || !finite_or_none(floor_)) return;
    if (call_.observed) result_.shown.window_top = floor_;
    if (!plan_.sinks.table.empty()) {
        States sinks(rows_, value_dim_);
        std::vector<float> top(rows_, kNone);
        attend_blocks(plan_, call_.query, plan_.sinks, sinks, top.data(), 0, heads_);
        if (!finite_or_none(sinks.lse)) return;
        merge_into(plan_, window_, sinks);
        window_tokens_ += tokens_of(plan_.sinks);
        window_bytes_ += bytes_of(plan_, plan_.sinks);
        if (call_.observed) raise(top, result_.shown.window_top);
    }
    if (call_.sinks) add_sinks(window_, call_.sinks);
    rotate_back(plan_.geometry, plan_.q_heads, 1, call_.query, {}, rows_of(query_.data()), true);
    if (!all_finite(query_)) throw std::invalid_argument("q holds NaN or infinity");
    finite_ = true;
    turn_query();
}

// Turns the query for the next search.
void StepRun::turn_query() {
    asked_ = query_;
    if (!next() || !next()->turn) return;
    const StepTurn& turn = *next()->turn;
    Geometry floats = plan_.geometry;
    floats.dtype = Dtype::float32;
    const Rotation rotation{turn.cos.data(), turn.sin.data(), static_cast<int>(turn.cos.size()),
                            turn.interleaved};
    rotate_back(floats, plan_.q_heads, 1, rows_of(query_.data()), rotation, rows_of(asked_.data()),
                true);
}

void StepRun::take(SearchResult found, std::int64_t ns) {
    ++searched_;
    found.dense.resize(rows_);
    const auto& retrieved = found.retrieved;
    for (std::int64_t row = 0; row < rows_; ++row) {
        for (std::int64_t i = retrieved.offsets[row]; i < retrieved.offsets[row + 1]; ++i) {
            floor_[row] = std::max(floor_[row], retrieved.scores[i]);
        }
    }
    const bool all = std::all_of(found.dense.begin(), found.dense.end(),
                                 [](std::uint8_t dense) { return dense != 0; });
    result_.found.push_back(std::move(found));
    result_.found_ns.push_back(ns);
    if (all) {
        searched_ = plan_.searches.size();
        gave_up_ = true;
    }
    turn_query();
}

StepResult StepRun::finish() {
    if (!finite_) return ended(StepEnd::not_finite);
    if (result_.found.size() > 1 && !gave_up_) cut_found(plan_, floor_, result_.found);
    if (call_.observed) {
        for (const SearchResult& found : result_.found) result_.shown.dense.push_back(found.dense);
    }
    give_up_where_many_are_found();
    if (!attend_found()) return ended(StepEnd::reads_everything);
    std::vector<std::uint8_t> heads = unguarded();
    result_.signs = signs();
    if (call_.unlike != Unlike::answered) result_.unlike = unlike();
    if (any_of(result_.unlike)) {
        if (call_.unlike == Unlike::refused) return ended(StepEnd::unlike);
        for (int head = 0; head < heads_; ++head) heads[head] |= result_.unlike[head];
    }
    if (any_of(heads)) {
        give_up(heads, call_.observed);
        if (!attend_found()) return ended(StepEnd::reads_everything);
    }
    result_.missed = share_of(missed_.data(), state_.lse.data(), missed_.size());
    result_.bound = share_of(bound_.data(), state_.lse.data(), bound_.size());
    std::copy(state_.lse.begin(), state_.lse.end(), call_.read_lse);
    std::copy(missed_.begin(), missed_.end(), call_.missed);
    if (!(result_.bound.largest <= plan_.bound_max)) return ended(StepEnd::bound_exceeded);
    return ended(merge_estimates() ? StepEnd::answered : StepEnd::not_finite);
}

// Gives up the KV heads for which so many tokens were found that reading everything costs less
// than picking them.
void StepRun::give_up_where_many_are_found() {
    const double most = plan_.found_share_max * static_cast<double>(plan_.tokens);
    std::vector<std::int64_t> found(heads_);
    for (const SearchResult& result : result_.found) {
        for (std::int64_t row = 0; row < rows_; ++row) {
            found[row / group_] +=
                result.retrieved.offsets[row + 1] - result.retrieved.offsets[row];
        }
    }
    std::vector<std::uint8_t> many(heads_);
    for (int head = 0; head < heads_; ++head) {
        many[head] = static_cast<double>(found[head]) / group_ > most;
    }
    give_up(many, false);
}

void StepRun::give_up(const std::vector<std::uint8_t>& heads, bool shown) {
    for (std::size_t i = 0; i < result_.found.size(); ++i) {
        const std::vector<std::uint8_t>& active = plan_.searches[i].active_heads;
        for (std::int64_t row = 0; row < rows_; ++row) {
            const std::int64_t head = row / group_;
            if (!heads[head] || (!active.empty() && !active[head])) continue;
            result_.found[i].dense[row] = 1;
            if (shown) result_.shown.dense[i][row] = 1;
        }
    }
}

std::vector<std::uint8_t> StepRun::dense_heads(const SearchResult& result) const {
    std::vector<std::uint8_t> heads(heads_);
    for (std::int64_t row = 0; row < rows_; ++row) heads[row / group_] |= result.dense[row];
    return heads;
}

// Attention over the window, what was found, and what is read whole; false where reading
// everything costs less.
bool StepRun::attend_found() {
    std::vector<std::vector<std::uint8_t>> dense;
    whole_ = whole_bytes_ = 0;
    const auto count = [&](std::int64_t tokens, const StepBlocks& blocks,
                           const std::vector<std::uint8_t>& heads) {
        const double share = std::accumulate(heads.begin(), heads.end(), 0.0) / heads_;
        if (share == 0) return;
        whole_ += share * static_cast<double>(tokens);
        whole_bytes_ += share * static_cast<double>(bytes_of(plan_, blocks));
    };
    for (const StepWhole& part : plan_.whole) count(part.tokens, part.blocks, part.heads);
    for (std::size_t i = 0; i < result_.found.size(); ++i) {
        dense.push_back(dense_heads(result_.found[i]));
        const StepSearch& search = plan_.searches[i];
        count(search.end - search.begin, search.blocks, dense[i]);
    }
    const auto searched = static_cast<double>(std::max<std::int64_t>(plan_.tokens, 1));
    if (whole_ / searched > plan_.whole_share_max) return false;
    state_ = window_;
    missed_.assign(rows_, kNone);
    bound_.assign(rows_, kNone);
    attended_ = 0;
    result_.shown.top = result_.shown.window_top;
    for (std::size_t i = 0; i < result_.found.size(); ++i) attend_one(i, dense[i]);
    for (const StepWhole& part : plan_.whole) read_whole(part.blocks, part.heads);
    for (std::size_t i = 0; i < result_.found.size(); ++i) {
        read_whole(plan_.searches[i].blocks, dense[i]);
    }
    return true;
}

// Merges what one search found, but for the KV heads that are read whole.
void StepRun::attend_one(std::size_t i, const std::vector<std::uint8_t>& dense) {
    const SearchResult* found = &result_.found[i];
    SearchResult kept;
    if (std::any_of(dense.begin(), dense.end(), [](std::uint8_t head) { return head != 0; })) {
        kept = without_heads(*found, dense, group_);
        found = &kept;
    }
    merge_states(plan_, state_, nullptr, found, plan_.searches[i].searcher->table,
                 state_.out.data(), Dtype::float32, state_.lse.data());
    attended_ += found->retrieved.offsets[rows_];
    if (call_.observed) {
        const indexes::RetrievedRows& rows = found->retrieved;
        raise_top({rows_, rows.offsets.data(), rows.scores.data(), nullptr},
                  result_.shown.top.data());
    }
    for (std::int64_t row = 0; row < rows_; ++row) {
        missed_[row] = log_sum(missed_[row], found->missed[row]);
        bound_[row] = log_sum(bound_[row], found->bound[row]);
    }
}

void StepRun::read_whole(const StepBlocks& blocks, const std::vector<std::uint8_t>& heads) {
    States whole(rows_, value_dim_);
    std::vector<float> top(rows_, kNone);
    bool any = false;
    for (int head = 0; head < heads_; ++head) {
        if (!heads[head]) continue;
        int end = head;
        while (end < heads_ && heads[end]) ++end;
        attend_blocks(plan_, call_.query, blocks, whole, top.data(), head, end);
        any = true;
        head = end;
    }
    if (any) merge_into(plan_, state_, whole);
    if (call_.observed) raise(top, result_.shown.top);
}

// The KV heads of which a query is estimated to miss more than its guard allows.
std::vector<std::uint8_t> StepRun::unguarded() const {
    std::vector<std::uint8_t> heads(heads_);
    for (std::int64_t row = 0; row < rows_ && !plan_.guards.empty(); ++row) {
        // Written so that what is no number counts as too much.
        const bool held = missed_[row] - state_.lse[row] <= plan_.guards[row / group_];
        heads[row / group_] |= static_cast<std::uint8_t>(!held);
    }
    return heads;
}

// Merges the estimates of what was not found; false where float32 cannot hold one.
bool StepRun::merge_estimates() {
    std::optional<States> last;
    for (const SearchResult& found : result_.found) {
        if (found.tail.empty()) continue;
        if (last) merge_into(plan_, state_, *last);
        last.emplace(rows_, value_dim_);
        last->out = found.tail;
        const std::vector<std::uint8_t> dense = dense_heads(found);
        for (std::int64_t row = 0; row < rows_; ++row) {
            if (!dense[row / group_]) last->lse[row] = found.missed[row];
        }
        if (!all_finite(last->out) || !finite_or_none(last->lse)) return false;
    }
    merge_states(plan_, state_, last ? &*last : nullptr, nullptr, nullptr, call_.out,
                 plan_.geometry.dtype, call_.lse);
    return true;
}

}  // namespace kvdb
