// Turns the candidates that a tile search left into the results of its rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../score/kernels.h"
#include "search.h"
#include "thread_pool.h"
#include "tile_search.h"

namespace kvdb::indexes::coarse {

// The result of one row, ascending, and the sums over the tokens that are not in it.
struct Row {
    std::vector<std::int32_t> ids;
    std::vector<float> scores;
    LogSum missed, bound;
    // In units of 2^tail_reference.
    double tail_reference = -std::numeric_limits<float>::infinity(), tail_weight = 0;
    std::vector<float> tail;
    bool dense = false;

    void add_to_tail(double exponent, double weight, const float* values);
};

// Adds a sum of weights, and that of the values times these weights, in units of 2^exponent.
inline void Row::add_to_tail(double exponent, double weight, const float* values) {
    if (!(weight > 0)) return;
    if (exponent > tail_reference) {
        const double scale = std::exp2(tail_reference - exponent);
        for (float& sum : tail) sum *= static_cast<float>(scale);
        tail_weight *= scale;
        tail_reference = exponent;
    }
    const double scale = std::exp2(exponent - tail_reference);
    tail_weight += weight * scale;
    for (std::size_t i = 0; i < tail.size(); ++i) tail[i] += static_cast<float>(scale) * values[i];
}

class RowCollector {
  public:
    RowCollector(const Blocks& blocks, const QueryRows& queries, const CoarseOptions& options,
                 const Tile& tile, TileSearch& tile_search)
        : blocks_(blocks),
          queries_(queries),
          options_(options),
          tile_(tile),
          tile_search_(tile_search) {}

    void run(std::vector<Row>& out) {
        sort_by_item();
        ThreadPool& pool = ThreadPool::instance();
        const std::int64_t rows = std::int64_t(tile_.queries.size());
        pool.run(rows, candidates_.size() < 65536 ? 1 : pool.threads(),
                 [&](std::int64_t row, int) { finish(row, out[tile_.queries[row].row]); });
    }

  private:
    struct IdScore {
        std::int32_t id;
        float score;
    };

    // Candidates of one key lie together and ascend.
    void sort_by_item() {
        begins_.assign(tile_search_.state.count() * tile_.rows + 1, 0);
        std::size_t total = 0;
        for (const auto& [found] : tile_search_.candidates) {
            for (const Candidate& candidate : found) ++begins_[candidate.key + 1];
            total += found.size();
        }
        for (std::size_t i = 1; i < begins_.size(); ++i) begins_[i] += begins_[i - 1];
        candidates_.resize(total);
        std::vector<std::int64_t> next(begins_.begin(), begins_.end() - 1);
        for (const auto& [found] : tile_search_.candidates) {
            for (const Candidate& candidate : found)
                candidates_[next[candidate.key]++] = {candidate.id, candidate.score};
        }
        // Candidates of pages that were scored for thresholds come behind the others.
        const auto earlier = [](const IdScore& a, const IdScore& b) { return a.id < b.id; };
        for (std::size_t i = 0; i + 1 < begins_.size(); ++i) {
            const auto begin = candidates_.begin() + begins_[i],
                       end = candidates_.begin() + begins_[i + 1];
            if (!std::is_sorted(begin, end, earlier)) std::sort(begin, end, earlier);
        }
    }

    void finish(std::int64_t number, Row& row) {
        const auto r = static_cast<int>(number % tile_.rows);
        const std::int64_t head = number / tile_.rows;
        const std::int64_t items = tile_search_.state.count(), kv_heads = blocks_.geometry.kv_heads;
        const int d = blocks_.geometry.value_dim;
        row.dense = tile_search_.state.dense[head];
        if (options_.tail) row.tail.assign(d, 0);
        if (!queries_.is_active(static_cast<int>(head))) return;
        std::int64_t count = 0;
        for (std::int64_t item = head; item < items; item += kv_heads) {
            const std::int64_t key = item * tile_.rows + r;
            const RowSums& sums = tile_search_.state.sums[key];
            row.missed.add(sums.missed.exponent, sums.missed.sum);
            row.bound.add(sums.bound.exponent, sums.bound.sum);
            row.missed.add(sums.dropped.exponent, sums.dropped.sum);
            row.bound.add(sums.dropped.exponent, sums.dropped.sum * 1.00001);
            count += begins_[key + 1] - begins_[key];
            if (!options_.tail) continue;
            row.add_to_tail(sums.tail_reference, sums.tail_weight,
                            tile_search_.tails.data() + key * d);
        }
        row.ids.reserve(count);
        row.scores.reserve(count);
        const auto each = [&](auto&& body) {
            for (std::int64_t item = head; item < items; item += kv_heads) {
                const std::int64_t key = item * tile_.rows + r;
                for (std::int64_t i = begins_[key]; i < begins_[key + 1]; ++i) body(candidates_[i]);
            }
        };
        Cut cut = this->cut(number, row, each);
        each([&](const IdScore& candidate) {
            if (candidate.score > cut.above || (candidate.score == cut.above && cut.equal-- > 0)) {
                row.ids.push_back(candidate.id);
                row.scores.push_back(candidate.score);
            } else {
                drop(number, candidate.id, candidate.score, row);
            }
        });
    }

    // Keeps the candidates above a score, and the first few of those equal to it.
    struct Cut {
        float above;
        std::int64_t equal;
    };

    template <class Each>
    Cut cut(std::int64_t number, const Row& row, const Each& each) const {
        const std::int64_t all = std::numeric_limits<std::int64_t>::max();
        std::vector<float> scores;
        float largest = queries_.floor[tile_.queries[number].row];
        each([&](const IdScore& candidate) {
            largest = std::max(largest, candidate.score);
            if (options_.retrieval == CoarseOptions::Retrieval::top_k ||
                options_.retrieval == CoarseOptions::Retrieval::top_p) {
                scores.push_back(candidate.score);
            }
        });
        if (options_.retrieval == CoarseOptions::Retrieval::range) {
            return {largest - static_cast<float>(options_.parameter), all};
        }
        std::size_t keep = scores.size();
        if (options_.retrieval == CoarseOptions::Retrieval::top_k) {
            keep = std::min(keep, static_cast<std::size_t>(options_.parameter));
            if (keep < scores.size()) {
                std::nth_element(scores.begin(), scores.begin() + (keep - 1), scores.end(),
                                 std::greater<>());
            }
        } else if (options_.retrieval == CoarseOptions::Retrieval::top_p) {
            std::sort(scores.begin(), scores.end(), std::greater<>());
            keep = count_for_share(number, row, scores);
        }
        if (keep == scores.size()) return {-std::numeric_limits<float>::infinity(), all};
        if (keep == 0) return {std::numeric_limits<float>::infinity(), 0};
        const float last = scores[keep - 1];
        const auto above = std::count_if(scores.begin(), scores.begin() + keep,
                                         [&](float score) { return score > last; });
        return {last, std::int64_t(keep) - above};
    }

    // How many of the scores, in descending order, have the share p of the mass together with the
    // mass outside, however much mass the unread tokens hold.
    std::size_t count_for_share(std::int64_t number, const Row& row,
                                const std::vector<float>& scores) const {
        if (scores.empty()) return 0;
        const double factor = options_.scale * kLog2E;
        const double top = factor * scores[0];
        const auto mass = [&](float score) { return std::exp2(factor * score - top); };
        LogSum total = row.bound;
        double retrieved = 0;
        for (const float score : scores) retrieved += mass(score);
        total.add(top, retrieved);
        const double outside = options_.outside[tile_.queries[number].row] * kLog2E;
        total.add(outside, 1);
        // Computed as a share of everything, because the mass outside may exceed a double relative
        // to `top`.
        const double everything = total.log2();
        double sum = std::exp2(outside - everything);
        std::size_t keep = 0;
        while (keep < scores.size() && sum < options_.parameter) {
            sum += std::exp2(factor * scores[keep++] - everything);
        }
        return keep;
    }

    // Drops a candidate that is not in the result.
    void drop(std::int64_t number, std::int32_t id, float score, Row& row) {
        const double exponent = options_.scale * kLog2E * score;
        row.missed.add(exponent, 1);
        row.bound.add(exponent, 1.00001);
        if (!options_.tail) return;
        const Geometry& geometry = blocks_.geometry;
        std::vector<float> value(geometry.value_dim);
        widen_values({blocks_, static_cast<int>(number / tile_.rows), id, 1, value.data()});
        row.add_to_tail(exponent, 1, value.data());
    }

    const Blocks& blocks_;
    const QueryRows& queries_;
    const CoarseOptions& options_;
    const Tile& tile_;
    TileSearch& tile_search_;
    std::vector<std::int64_t> begins_;
    std::vector<IdScore> candidates_;
};

}  // namespace kvdb::indexes::coarse
