#include "search.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../score/kernels.h"
#include "pass.h"
#include "thread_pool.h"

namespace kvdb::indexes {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr double kLn2 = 0.6931471805599453;
constexpr std::int64_t kRowsTogether = 16;  // of a KV head, whose reads are shared

using Want = CoarseOptions::Want;

// The hits of one row, ascending, and the sums over what is none.
struct Row {
    std::vector<std::int32_t> ids;
    std::vector<float> scores;
    LogSum missed, bound;
    double tail_weight = 0;
    std::vector<float> tail;
    bool dense = false;
};

// Turns what a pass left into rows.
class Finish {
  public:
    Finish(const Blocks& blocks, const QueryRows& queries, const CoarseOptions& options,
           const Tile& tile, Pass& pass)
        : blocks_(blocks), queries_(queries), options_(options), tile_(tile), pass_(pass) {}

    void run(std::vector<Row>& out) {
        sort_by_item();
        ThreadPool& pool = ThreadPool::instance();
        const std::int64_t rows = std::int64_t(tile_.queries.size());
        pool.run(rows, hits_.size() < 65536 ? 1 : pool.threads(),
                 [&](std::int64_t row, int) { finish(row, out[tile_.queries[row].row]); });
    }

  private:
    struct IdScore {
        std::int32_t id;
        float score;
    };

    // Hits of one key lie together and ascend.
    void sort_by_item() {
        begins_.assign(pass_.items.count() * tile_.rows + 1, 0);
        std::size_t total = 0;
        for (const auto& hits : pass_.hits) {
            for (const Hit& hit : hits) ++begins_[hit.key + 1];
            total += hits.size();
        }
        for (std::size_t i = 1; i < begins_.size(); ++i) begins_[i] += begins_[i - 1];
        hits_.resize(total);
        std::vector<std::int64_t> next(begins_.begin(), begins_.end() - 1);
        for (const auto& hits : pass_.hits) {
            for (const Hit& hit : hits) hits_[next[hit.key]++] = {hit.id, hit.score};
        }
        // Those of pages that were scored for thresholds come behind the others.
        const auto earlier = [](const IdScore& a, const IdScore& b) { return a.id < b.id; };
        for (std::size_t i = 0; i + 1 < begins_.size(); ++i) {
            const auto begin = hits_.begin() + begins_[i], end = hits_.begin() + begins_[i + 1];
            if (!std::is_sorted(begin, end, earlier)) std::sort(begin, end, earlier);
        }
    }

    void finish(std::int64_t number, Row& row) {
        const auto r = static_cast<int>(number % tile_.rows);
        const std::int64_t head = number / tile_.rows;
        const std::int64_t items = pass_.items.count(), kv_heads = blocks_.geometry.kv_heads;
        const int d = blocks_.geometry.head_dim;
        row.dense = pass_.items.dense[head];
        if (options_.tail) row.tail.assign(d, 0);
        if (!queries_.is_asked(static_cast<int>(head))) return;
        std::int64_t count = 0;
        for (std::int64_t item = head; item < items; item += kv_heads) {
            const std::int64_t key = item * tile_.rows + r;
            const RowSums& sums = pass_.items.sums[key];
            row.missed.add(sums.missed.exponent, sums.missed.sum);
            row.bound.add(sums.bound.exponent, sums.bound.sum);
            row.missed.add(sums.turned_down.exponent, sums.turned_down.sum);
            row.bound.add(sums.turned_down.exponent, sums.turned_down.sum * 1.00001);
            row.tail_weight += sums.tail_weight;
            count += begins_[key + 1] - begins_[key];
            for (int i = 0; options_.tail && i < d; ++i) row.tail[i] += pass_.tails[key * d + i];
        }
        row.ids.reserve(count);
        row.scores.reserve(count);
        const auto each = [&](auto&& body) {
            for (std::int64_t item = head; item < items; item += kv_heads) {
                const std::int64_t key = item * tile_.rows + r;
                for (std::int64_t i = begins_[key]; i < begins_[key + 1]; ++i) body(hits_[i]);
            }
        };
        Cut cut = this->cut(number, row, each);
        each([&](const IdScore& hit) {
            if (hit.score > cut.above || (hit.score == cut.above && cut.equal-- > 0)) {
                row.ids.push_back(hit.id);
                row.scores.push_back(hit.score);
            } else {
                turn_down(number, hit.id, hit.score, row);
            }
        });
    }

    // Hits above a score are kept, and of those equal to it the first few.
    struct Cut {
        float above;
        std::int64_t equal;
    };

    template <class Each>
    Cut cut(std::int64_t number, const Row& row, const Each& each) const {
        const std::int64_t all = std::numeric_limits<std::int64_t>::max();
        std::vector<float> scores;
        float largest = queries_.floor[tile_.queries[number].row];
        each([&](const IdScore& hit) {
            largest = std::max(largest, hit.score);
            if (options_.want == Want::top_k || options_.want == Want::top_p) {
                scores.push_back(hit.score);
            }
        });
        if (options_.want == Want::range) {
            return {largest - static_cast<float>(options_.parameter), all};
        }
        std::size_t keep = scores.size();
        if (options_.want == Want::top_k) {
            keep = std::min(keep, static_cast<std::size_t>(options_.parameter));
            if (keep < scores.size()) {
                std::nth_element(scores.begin(), scores.begin() + (keep - 1), scores.end(),
                                 std::greater<>());
            }
        } else if (options_.want == Want::top_p) {
            std::sort(scores.begin(), scores.end(), std::greater<>());
            keep = fewest(number, row, scores);
        }
        if (keep == scores.size()) return {kNone, all};
        if (keep == 0) return {std::numeric_limits<float>::infinity(), 0};
        const float last = scores[keep - 1];
        const auto above = std::count_if(scores.begin(), scores.begin() + keep,
                                         [&](float score) { return score > last; });
        return {last, std::int64_t(keep) - above};
    }

    // How many of the scores, descending, have the share p of the mass of everything together with
    // what is outside.
    std::size_t fewest(std::int64_t number, const Row& row,
                       const std::vector<float>& scores) const {
        if (scores.empty()) return 0;
        const double factor = options_.scale * kLog2E;
        const double top = factor * scores[0];
        const auto mass = [&](float score) { return std::exp2(factor * score - top); };
        LogSum total = row.missed;
        double found = 0;
        for (const float score : scores) found += mass(score);
        total.add(top, found);
        const double outside = options_.outside[tile_.queries[number].row] * kLog2E;
        total.add(outside, 1);
        // As a share of everything, for outside may weigh more than a double holds beside `top`.
        const double everything = total.log2();
        double sum = std::exp2(outside - everything);
        std::size_t keep = 0;
        while (keep < scores.size() && sum < options_.parameter) {
            sum += std::exp2(factor * scores[keep++] - everything);
        }
        return keep;
    }

    // A token that was a hit while it was read, and is none.
    void turn_down(std::int64_t number, std::int32_t id, float score, Row& row) {
        const double exponent = options_.scale * kLog2E * score;
        row.missed.add(exponent, 1);
        row.bound.add(exponent, 1.00001);
        if (!options_.tail) return;
        const Geometry& geometry = blocks_.geometry;
        const auto weight =
            std::exp2(std::min(exponent - pass_.items.plans[number].reference, 64.0));
        std::vector<float> value(geometry.head_dim);
        score_kernels().widen_values[static_cast<int>(geometry.dtype)](
            {blocks_, static_cast<int>(number / tile_.rows), id, 1, value.data()});
        row.tail_weight += weight;
        for (int i = 0; i < geometry.head_dim; ++i) {
            row.tail[i] += static_cast<float>(weight) * value[i];
        }
    }

    const Blocks& blocks_;
    const QueryRows& queries_;
    const CoarseOptions& options_;
    const Tile& tile_;
    Pass& pass_;
    std::vector<std::int64_t> begins_;
    std::vector<IdScore> hits_;
};

// Those that some query sees a token of.
std::vector<Segment> segments_of(const std::vector<Pages>& batches, const QueryRows& queries) {
    std::vector<Segment> segments;
    if (queries.n == 0) return segments;
    const std::int64_t first = *std::min_element(queries.begin, queries.begin + queries.n);
    const std::int64_t last = *std::max_element(queries.end, queries.end + queries.n);
    std::int64_t pages = 0;
    for (const Pages& batch : batches) {
        for (std::int64_t s = 0; s < batch.segments; ++s) {
            const std::int64_t begin = batch.begin + s * batch.tokens;
            if (begin >= last || begin + batch.tokens <= first) continue;
            segments.push_back({&batch, s, begin, begin + batch.tokens, pages});
            pages += batch.pages;
        }
    }
    return segments;
}

// Rows as one array after the other.
CoarseFound gather(const std::vector<Row>& rows, const CoarseOptions& options, int head_dim) {
    CoarseFound out;
    std::int64_t count = 0;
    out.found.offsets.push_back(0);
    for (const Row& row : rows) {
        count += std::int64_t(row.ids.size());
        out.found.offsets.push_back(count);
    }
    out.found.ids.reserve(count);
    out.found.scores.reserve(count);
    for (const Row& row : rows) {
        out.found.ids.insert(out.found.ids.end(), row.ids.begin(), row.ids.end());
        out.found.scores.insert(out.found.scores.end(), row.scores.begin(), row.scores.end());
        const auto missed = static_cast<float>(row.missed.log2() * kLn2);
        // Rounded up by more than float32 may have rounded down.
        double bound = row.bound.log2() * kLn2;
        if (bound > kNone) bound += 1e-5 + 1e-6 * std::fabs(bound);
        out.missed_bound.push_back(static_cast<float>(bound));
        out.missed.push_back(std::min(missed, out.missed_bound.back()));
        out.dense.push_back(row.dense);
        if (!options.tail) continue;
        const auto share = static_cast<float>(row.tail_weight > 0 ? 1 / row.tail_weight : 0);
        for (int i = 0; i < head_dim; ++i) out.tail.push_back(row.tail[i] * share);
    }
    return out;
}

}  // namespace

CoarseFound search_pages(const Blocks& blocks, const std::vector<Pages>& batches,
                         const QueryRows& queries, const CoarseOptions& options) {
    const Geometry& geometry = blocks.geometry;
    const std::vector<Segment> segments = segments_of(batches, queries);
    const bool box = !batches.empty() && batches[0].box;
    const bool priorities = !batches.empty() && batches[0].all.farthest;
    std::vector<Row> rows(geometry.kv_heads * queries.rows());
    const std::int64_t each = std::max<std::int64_t>(1, kRowsTogether / queries.group);
    const auto heads = std::int64_t(queries.heads(geometry.kv_heads).size());
    std::int64_t scanned = 0, nbytes = 0;
    for (std::int64_t i = 0; i < queries.n; i += each) {
        Tile tile(segments, queries, geometry, i, std::min(each, queries.n - i), box, priorities);
        Pass pass(blocks, segments, queries, options, tile);
        pass.run();
        Finish(blocks, queries, options, tile, pass).run(rows);
        for (const Segment& segment : segments) {
            const Pages& pages = *segment.pages;
            const bool radius = pages.all.radius, farthest = pages.all.farthest;
            const std::int64_t page_bytes = pages.center_dims() + 4 + (radius ? 12 : 0) +
                                            (farthest ? geometry.head_dim + 4 : 0);
            scanned += heads * pages.pages;
            nbytes += heads * pages.pages * page_bytes;
        }
        for (const std::int64_t tokens : pass.read) {
            scanned += tokens;
            nbytes += tokens * std::int64_t(geometry.row_bytes());
        }
    }
    CoarseFound out = gather(rows, options, geometry.head_dim);
    out.scanned = scanned;
    out.nbytes = nbytes;
    return out;
}

}  // namespace kvdb::indexes
