#include "missed_mass.h"

#include <algorithm>
#include <cmath>

#include "../score/kernels.h"

namespace kvdb::indexes::coarse {

void MissedMass::add_unread(SearchState& state, const SegmentHead& item,
                            const std::vector<std::int32_t>& read, std::vector<float>& weights) {
    const std::int64_t pages = item.view.pages;
    const float* held = nullptr;  // whose counts unread_ has
    for (int r = 0; r < state.rows; ++r) {
        const float* counts = state.counts(item.view, r);
        if (counts != held) {
            unread_.assign(counts, counts + pages);
            for (const std::int32_t p : read) unread_[p] = 0;
            held = counts;
        }
        RowSums& sum = state.sum(item, r);
        MassItem mass{item.view.middle(r), item.view.reach(r), unread_.data(), pages,
                      sum.curve,           state.factor};
        const float likely = coarse_kernels().likely(mass);
        mass.likely_reference = std::isfinite(likely) ? likely : 0.0f;
        mass.bound_reference = state.factor * sum.top;
        if (!weights.empty()) {
            mass.each = weights.data() + r * pages;
            if (std::isfinite(likely)) sum.raise_tail_reference(likely, mass.each, pages);
            const double share = std::exp2(double{mass.likely_reference} - sum.tail_reference);
            mass.share = std::isfinite(likely) ? static_cast<float>(share) : 0.0f;
        }
        coarse_kernels().mass(mass);
        sum.tail_weight += mass.each_total;
        if (!(mass.total > 0)) continue;
        sum.missed.add(likely, mass.estimate);
        // Terms that underflow are less than 2^-126 for each token.
        sum.bound.add(mass.bound_reference, mass.bound * 1.00001 + 1e-28);
    }
}

void MissedMass::add_tail(const SearchState& state, const SegmentHead& item,
                          std::vector<float>& weights, float* out) {
    for (std::int64_t i = 0; i < state.tile.n; ++i) {
        if (item.visible.whole(state.tile.i0 + i)) continue;
        add_partly_seen(state, item, i, weights.data(), out);
    }
    coarse_kernels().blend(
        {item.set.values, weights.data(), item.view.pages, state.rows, state.value_dim, out});
}

// The mean values of pages of which query i of the tile sees only some tokens. If it sees most of
// them, the few unseen values are subtracted from the mean. If it sees few, or if tokens are
// hidden, which must not leave even a rounding error behind, the mean is computed anew from the
// seen tokens, and the page's weight is lost.
void MissedMass::add_partly_seen(const SearchState& state, const SegmentHead& item, std::int64_t i,
                                 float* weights, float* out) {
    const std::int64_t pages = item.view.pages, n = state.tile.n;
    const int d = state.value_dim;
    const float* counts = item.view.counts + i * pages;
    value_.resize(d);
    shares_.resize(state.rows);
    for (std::int64_t p = 0; p < pages; ++p) {
        const auto size = static_cast<float>(item.set.first[p + 1] - item.set.first[p]);
        const float seen = counts[p];
        if (seen == 0 || seen == size) continue;
        const bool without = !item.visible.hides() && 2 * seen > size;
        bool weighs = false;
        for (std::int64_t r = i; r < state.rows; r += n) {
            float& weight = weights[r * pages + p];
            weighs = weighs || weight > 0;
            shares_[r] = (without ? -weight : weight) / seen;
            weight = without ? weight * (size / seen) : 0;
        }
        for (std::int64_t m = item.set.first[p]; m < item.set.first[p + 1] && weighs; ++m) {
            const std::int64_t member = item.set.member(m);
            if (item.visible.sees(state.tile.i0 + i, member) == without) continue;
            widen_values(
                {state.blocks, item.kv_head, item.segment.begin + member, 1, value_.data()});
            for (std::int64_t r = i; r < state.rows; r += n) {
                float* to = out + r * d;
                for (int j = 0; j < d; ++j) to[j] += shares_[r] * value_[j];
            }
        }
    }
}

}  // namespace kvdb::indexes::coarse
