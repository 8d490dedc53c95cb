#include "joint_search.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

namespace kvdb {
namespace {

using indexes::QueryRows;
using indexes::SearchResult;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kAlike = 4;  // rows that searches take at a time

std::int64_t nanoseconds(Clock::time_point since) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - since).count();
}

float dot(const float* a, const float* b, std::int64_t dims) {
    float sums[16] = {};
    std::int64_t i = 0;
    for (; i + 16 <= dims; i += 16) {
        for (int j = 0; j < 16; ++j) sums[j] += a[i + j] * b[i + j];
    }
    for (; i < dims; ++i) sums[0] += a[i] * b[i];
    return std::accumulate(sums, sums + 16, 0.0f);
}

// What a search is asked for one step or several: rows [kv_heads][steps of the query heads of a
// group], in any order within a KV head.
class Asked {
  public:
    // Rows of a KV head that look into the same direction stand together, because a search reads
    // for all rows that it takes at a time what one of them needs.
    Asked(const std::vector<StepRun*>& steps, const StepPlan& plan)
        : heads_(plan.geometry.kv_heads),
          group_(plan.rows_of_head()),
          rows_(static_cast<std::int64_t>(steps.size()) * group_),
          dim_(plan.geometry.head_dim),
          order_(heads_ * rows_),
          query_(order_.size() * dim_),
          floor_(order_.size()),
          outside_(order_.size()) {
        for (std::int64_t head = 0; head < heads_; ++head) {
            std::vector<const float*> queries;
            for (std::int64_t r = 0; r < rows_; ++r) {
                queries.push_back(steps[r / group_]->query() + own_row(head, r) * dim_);
            }
            const std::vector<std::int64_t> order = alike_together(queries);
            for (std::int64_t at = 0; at < rows_; ++at) {
                const std::int64_t r = order[at], to = head * rows_ + at;
                const StepRun& step = *steps[r / group_];
                order_[head * rows_ + r] = to;
                std::copy_n(queries[r], dim_, query_.data() + to * dim_);
                floor_[to] = step.floor()[own_row(head, r)];
                outside_[to] = step.outside()[own_row(head, r)];
            }
        }
    }

    SearchResult search(const StepSearch& part, const std::vector<std::uint8_t>& active) const {
        const QueryRows queries{
            query_.data(),
            1,
            static_cast<int>(rows_),
            &part.begin,
            &part.end,
            part.hidden.empty() ? nullptr : part.hidden.data(),
            floor_.data(),
            active.empty() ? nullptr : reinterpret_cast<const bool*>(active.data())};
        SearchResult found = part.searcher->search(queries, outside_.data());
        found.dense.resize(order_.size());
        return found;
    }

    // What was found for one of the steps.
    SearchResult of(std::int64_t step, const SearchResult& all) const {
        SearchResult own;
        const auto steps = static_cast<std::int64_t>(rows_ / group_);
        own.scanned = all.scanned / steps;
        own.nbytes = all.nbytes / steps;
        const auto dims = static_cast<std::int64_t>(all.tail.size() / order_.size());
        const auto add = [](const auto& from, auto& to, std::int64_t begin, std::int64_t end) {
            to.insert(to.end(), from.begin() + begin, from.begin() + end);
        };
        for (std::int64_t own_number = 0; own_number < heads_ * group_; ++own_number) {
            const std::int64_t head = own_number / group_;
            const std::int64_t row = order_[head * rows_ + step * group_ + own_number % group_];
            const std::int64_t begin = all.retrieved.offsets[row];
            const std::int64_t end = all.retrieved.offsets[row + 1];
            add(all.retrieved.ids, own.retrieved.ids, begin, end);
            add(all.retrieved.scores, own.retrieved.scores, begin, end);
            own.retrieved.offsets.push_back(static_cast<std::int64_t>(own.retrieved.ids.size()));
            own.missed.push_back(all.missed[row]);
            own.bound.push_back(all.bound[row]);
            own.dense.push_back(all.dense[row]);
            add(all.tail, own.tail, row * dims, (row + 1) * dims);
        }
        return own;
    }

  private:
    // Of row r of a KV head, among the rows of its step.
    std::int64_t own_row(std::int64_t head, std::int64_t r) const {
        return head * group_ + r % group_;
    }

    std::vector<std::int64_t> alike_together(const std::vector<const float*>& queries) const {
        std::vector<std::int64_t> order(queries.size());
        std::iota(order.begin(), order.end(), 0);
        if (rows_ <= kAlike) return order;
        std::vector<float> length(queries.size());
        for (std::int64_t r = 0; r < rows_; ++r) {
            length[r] = std::sqrt(dot(queries[r], queries[r], dim_)) + 1e-30f;
        }
        for (std::int64_t at = 1; at < rows_; ++at) {
            // Of those that are left the one most like the first of the rows it stands with.
            const std::int64_t leader = order[(at - 1) / kAlike * kAlike];
            std::int64_t best = at;
            float most = -INFINITY;
            for (std::int64_t i = at; i < rows_; ++i) {
                const float cosine =
                    dot(queries[leader], queries[order[i]], dim_) / length[order[i]];
                if (cosine > most) {
                    most = cosine;
                    best = i;
                }
            }
            std::swap(order[at], order[best]);
        }
        return order;
    }

    const std::int64_t heads_, group_, rows_, dim_;
    std::vector<std::int64_t> order_;  // [kv_heads][rows] where a row of some step stands
    std::vector<float> query_, floor_, outside_;
};

// The KV heads of which some row was given up.
std::vector<std::uint8_t> dense_heads(const SearchResult& found, std::int64_t heads) {
    std::vector<std::uint8_t> dense(heads);
    const std::size_t rows = found.dense.size() / heads;
    for (std::size_t row = 0; row < found.dense.size(); ++row)
        dense[row / rows] |= found.dense[row];
    return dense;
}

// The one result, with the rows of some KV heads from the other.
SearchResult with_heads(const SearchResult& result, const SearchResult& other,
                        const std::vector<std::uint8_t>& heads) {
    SearchResult both;
    both.scanned = result.scanned + other.scanned;
    both.nbytes = result.nbytes + other.nbytes;
    const auto rows = static_cast<std::int64_t>(result.dense.size());
    const std::int64_t group = rows / static_cast<std::int64_t>(heads.size());
    const auto dims = static_cast<std::int64_t>(result.tail.size()) / rows;
    for (std::int64_t row = 0; row < rows; ++row) {
        const SearchResult& from = heads[row / group] ? other : result;
        const std::int64_t begin = from.retrieved.offsets[row];
        const std::int64_t end = from.retrieved.offsets[row + 1];
        const auto add = [](const auto& of, auto& to, std::int64_t first, std::int64_t last) {
            to.insert(to.end(), of.begin() + first, of.begin() + last);
        };
        add(from.retrieved.ids, both.retrieved.ids, begin, end);
        add(from.retrieved.scores, both.retrieved.scores, begin, end);
        both.retrieved.offsets.push_back(static_cast<std::int64_t>(both.retrieved.ids.size()));
        both.missed.push_back(from.missed[row]);
        both.bound.push_back(from.bound[row]);
        both.dense.push_back(from.dense[row]);
        add(from.tail, both.tail, row * dims, (row + 1) * dims);
    }
    return both;
}

}  // namespace

void search_together(const std::vector<StepRun*>& steps, const StepPlan& plan) {
    const auto started = Clock::now();
    const StepSearch& part = *steps[0]->next();
    const Asked asked(steps, plan);
    const SearchResult found = asked.search(part, part.active_heads);
    const auto count = static_cast<std::int64_t>(steps.size());
    std::vector<SearchResult> own;
    for (std::int64_t i = 0; i < count; ++i) own.push_back(asked.of(i, found));
    // Together, rows may want more than pays although none of the steps does alone.
    const std::vector<std::uint8_t> dense = dense_heads(found, plan.geometry.kv_heads);
    if (count > 1 && std::count(dense.begin(), dense.end(), 0) < std::ssize(dense)) {
        for (std::int64_t i = 0; i < count; ++i) {
            const Asked alone({steps[i]}, plan);
            own[i] = with_heads(own[i], alone.of(0, alone.search(part, dense)), dense);
        }
    }
    const std::int64_t ns = nanoseconds(started) / count;
    for (std::int64_t i = 0; i < count; ++i) steps[i]->take(std::move(own[i]), ns);
}

}  // namespace kvdb
