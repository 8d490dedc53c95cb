#include "density.h"

#include <algorithm>
#include <bit>

namespace kvdb::indexes::coarse {
namespace {

// A row reads at most one in this many tokens, or a number that costs little anyway, unless the
// pages' centers alone reach the threshold.
constexpr std::int64_t kShare = 32;
constexpr std::int64_t kLittle = 4096;
// Fewer tokens are never left to an exact read.
constexpr std::int64_t kLeast = 4096;
// The largest share of the tokens that is worth reading in pages. An exact read takes keys and
// values in order; scattered pages with 59 % of the keys were measured to take 1.7 times as long as
// it.
constexpr double kWorth = 0.25;
// Of tokens whose exponents have this variance s, and whose values have nothing to do with each
// other, the mean of their page is off by sqrt(1 - exp(-s)), 0.63, of their weighted sum.
constexpr double kSpread = 0.5;

}  // namespace

double Density::limit() const {
    const QueryRows& queries = state_.queries;
    std::int64_t visible = 0;
    for (std::int64_t i = state_.tile.i0; i < state_.tile.i0 + state_.tile.n; ++i) {
        visible = std::max(visible, queries.end[i] - queries.begin[i]);
    }
    const bool answer = !state_.options.give_up || state_.blocks.tokens < kLeast;
    return answer ? std::numeric_limits<double>::infinity() : kWorth * double(visible);
}

Density::Reads Density::reads(int kv_head, int r, std::size_t shares, double stop) const {
    const RowPlan& plan = state_.plan(kv_head, r);
    Reads total{};
    for (const Segment& segment : state_.segments) {
        const Tile::View view = state_.tile.view(segment, kv_head);
        const float* counts = state_.counts(view, r);
        const float* best = view.best(r);
        for (std::int64_t g = 0; g < view.pages / kPageGroup; ++g) {
            if (best[g] < plan.page_threshold) continue;
            for (std::size_t s = 0; s < shares; ++s) {
                const float margin = kShares[s] * plan.margin;
                std::uint32_t read = view.reaching(r, g, margin, plan.page_threshold);
                for (; read; read &= read - 1) {
                    total[s] += double{counts[g * kPageGroup + std::countr_zero(read)]};
                }
            }
        }
        if (total[shares - 1] > stop) break;
    }
    return total;
}

double Density::most() const {
    std::int64_t tokens = 0;
    for (const Segment& segment : state_.segments) tokens += segment.end - segment.begin;
    return double(std::max(kLittle, tokens / kShare));
}

bool Density::excessive(int kv_head, int r) const {
    const double most = this->most();
    return reads(kv_head, r, 1, most)[0] > most;
}

bool Density::means_mislead(int kv_head, int r) const {
    if (!state_.options.tail || !state_.options.give_up) return false;
    for (std::size_t s = 0; s < state_.segments.size(); ++s) {
        if (state_.sum(state_.at(s, kv_head), r).spread > kSpread) return true;
    }
    return false;
}

void Density::narrow(int kv_head, int r) {
    RowPlan& plan = state_.plan(kv_head, r);
    if (state_.options.give_up || !excessive(kv_head, r)) return;
    const double most = this->most();
    const Reads read = reads(kv_head, r, kShares.size(), std::numeric_limits<double>::infinity());
    std::size_t s = 0;
    while (s + 1 < kShares.size() && read[s] > most) ++s;
    plan.margin *= kShares[s];
}

void Density::give_up(int kv_head) {
    const double limit = this->limit();
    if (limit == std::numeric_limits<double>::infinity()) return;
    double each = 0;
    for (int r = 0; r < state_.rows && each <= limit; ++r) {
        each += reads(kv_head, r, 1, limit)[0];
    }
    // Rows may read the same pages.
    state_.dense[kv_head] = each > limit && reads_together(kv_head, limit) > limit;
}

// Tokens of the pages that any row reads; stops where they come to more than `stop`.
double Density::reads_together(int kv_head, double stop) const {
    double total = 0;
    std::vector<float> read;
    for (std::size_t s = 0; s < state_.segments.size() && total <= stop; ++s) {
        const Tile::View view = state_.tile.view(state_.segments[s], kv_head);
        read.assign(view.pages, 0);
        for (int r = 0; r < state_.rows; ++r) {
            const RowPlan& plan = state_.plan(kv_head, r);
            const float* counts = state_.counts(view, r);
            const float* best = view.best(r);
            for (std::int64_t p = 0; p < view.pages; ++p) {
                if (best[p / kPageGroup] < plan.page_threshold) {
                    p += kPageGroup - 1;
                    continue;
                }
                const bool below = view.priority(r, p, plan.margin) < plan.page_threshold;
                if (!below) read[p] = std::max(read[p], counts[p]);
            }
        }
        for (const float tokens : read) total += double{tokens};
    }
    return total;
}

}  // namespace kvdb::indexes::coarse
