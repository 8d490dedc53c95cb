#include "density.h"

#include <algorithm>

namespace kvdb::indexes {
namespace {

// A row reads no more than one in this many tokens, or what costs little anyway, unless the centers
// of pages ask for it.
constexpr std::int64_t kShare = 32;
constexpr std::int64_t kLittle = 4096;
// Fewer tokens are never left to an exact read.
constexpr std::int64_t kLeast = 4096;
// What a byte of a key in a page costs, in bytes of keys and values that are read in order.
constexpr double kScattered = 6;

}  // namespace

double Density::limit(int r) const {
    const std::int64_t i = items_.tile.i0 + r % items_.tile.n;
    const std::int64_t visible = items_.queries.end[i] - items_.queries.begin[i];
    if (!items_.options.give_up || visible < kLeast) return std::numeric_limits<double>::infinity();
    return 2 / kScattered * double(visible);  // keys and values against keys
}

Density::Reads Density::reads(int kv_head, int r, std::size_t shares, double stop) const {
    const RowPlan& plan = items_.plan(kv_head, r);
    Reads total{};
    for (const Segment& segment : items_.segments) {
        const Tile::View view = items_.tile.view(segment, kv_head);
        const float* counts = items_.counts(view, r);
        const float* best = view.best(r);
        for (std::int64_t g = 0; g < view.pages / kPageGroup; ++g) {
            if (!(best[g] >= plan.page_threshold)) continue;
            for (std::size_t s = 0; s < shares; ++s) {
                const float margin = kShares[s] * plan.margin;
                float tokens[4] = {};
                for (std::int64_t p = g * kPageGroup; p < (g + 1) * kPageGroup; ++p) {
                    const bool read = view.priority(r, p, margin) >= plan.page_threshold;
                    tokens[p % 4] += read ? counts[p] : 0.0f;
                }
                total[s] += double{tokens[0] + tokens[1] + tokens[2] + tokens[3]};
            }
        }
        if (total[shares - 1] > stop) break;
    }
    return total;
}

double Density::most() const {
    std::int64_t tokens = 0;
    for (const Segment& segment : items_.segments) tokens += segment.end - segment.begin;
    return double(std::max(kLittle, tokens / kShare));
}

bool Density::excessive(int kv_head, int r) const {
    return reads(kv_head, r, 1, most())[0] > most();
}

void Density::narrow(int kv_head, int r) {
    RowPlan& plan = items_.plan(kv_head, r);
    const double most = this->most(), limit = this->limit(r);
    const Reads read = reads(kv_head, r, kShares.size(), limit);
    if (read.back() > limit) {
        plan.dense = true;
        return;
    }
    std::size_t s = 0;
    while (s + 1 < kShares.size() && read[s] > most) ++s;
    plan.margin *= kShares[s];
}

void Density::give_up(int kv_head) {
    if (!items_.options.give_up) return;
    double together = 0, most = 0;
    for (int r = 0; r < items_.rows; ++r) {
        RowPlan& plan = items_.plan(kv_head, r);
        if (plan.dense) continue;
        const double limit = this->limit(r), read = reads(kv_head, r, 1, limit)[0];
        plan.dense = read > limit;
        if (plan.dense) continue;
        together += read;
        most = std::max(most, limit);
    }
    if (together <= most || reads_together(kv_head) <= most) return;
    for (int r = 0; r < items_.rows; ++r) items_.plan(kv_head, r).dense = true;
}

// Tokens of the pages that any row reads that is answered.
double Density::reads_together(int kv_head) const {
    double total = 0;
    std::vector<float> read;
    for (const Segment& segment : items_.segments) {
        const Tile::View view = items_.tile.view(segment, kv_head);
        read.assign(view.pages, 0);
        for (int r = 0; r < items_.rows; ++r) {
            const RowPlan& plan = items_.plan(kv_head, r);
            const float* counts = items_.counts(view, r);
            for (std::int64_t p = 0; p < view.pages && !plan.dense; ++p) {
                const bool reached = view.priority(r, p, plan.margin) >= plan.page_threshold;
                if (reached) read[p] = std::max(read[p], counts[p]);
            }
        }
        for (const float tokens : read) total += tokens;
    }
    return total;
}

}  // namespace kvdb::indexes
