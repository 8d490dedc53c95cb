#include "weighing.h"

#include <algorithm>
#include <cmath>

#include "../score/kernels.h"

namespace kvdb::indexes {
namespace {

constexpr double kTailOctaves = 40;  // below its largest weight a tail has nothing

}  // namespace

void Weighing::weigh(Items& items, const Item& item, const std::vector<std::int32_t>& read) {
    const std::int64_t pages = item.view.pages;
    const float* held = nullptr;  // whose counts unread_ has
    for (int r = 0; r < items.rows; ++r) {
        const float* counts = items.counts(item.view, r);
        if (counts != held) {
            unread_.assign(counts, counts + pages);
            for (const std::int32_t p : read) unread_[p] = 0;
            held = counts;
        }
        RowSums& sum = items.sum(item, r);
        MassItem mass{item.view.middle(r), item.view.reach(r), unread_.data(),        pages,
                      sum.curve,           items.factor,       items.factor * sum.top};
        coarse_kernels().mass(mass);
        if (!(mass.total > 0)) continue;
        sum.missed.add(mass.reference, mass.estimate);
        // What underflows is less than 2^-126 for each token.
        sum.bound.add(mass.reference, mass.bound * 1.00001 + 1e-28);
    }
}

void Weighing::add_page_value(const Items& items, const Item& item, std::int64_t page, int r,
                              float weight, float* out) {
    const int d = items.head_dim;
    const float count = items.counts(item.view, r)[page];
    if (count == static_cast<float>(item.set.first[page + 1] - item.set.first[page])) {
        coarse_kernels().add({item.set.values + page * d, d, weight, out});
        return;
    }
    // The mean value would tell of tokens that are not seen.
    tokens_.clear();
    items.members(item, page, items.tile.query(item.kv_head, r).i, tokens_);
    value_.resize(d);
    for (const std::int32_t token : tokens_) {
        score_kernels().widen_values[static_cast<int>(items.blocks.geometry.dtype)](
            {items.blocks, item.kv_head, token, 1, value_.data()});
        for (int j = 0; j < d; ++j) out[j] += weight / count * value_[j];
    }
}

void Weighing::weigh_tail(Items& items, const Item& item, const std::vector<std::int32_t>& read,
                          const std::vector<float>& weights, float* out) {
    const std::int64_t pages = item.view.pages;
    for (int r = 0; r < items.rows; ++r, out += items.head_dim) {
        const float* counts = items.counts(item.view, r);
        const RowPlan& plan = items.plan(item.kv_head, r);
        unread_.assign(counts, counts + pages);
        for (const std::int32_t p : read) unread_[p] = 0;
        double& total = items.sum(item, r).tail_weight;
        for (std::int64_t p = 0; p < pages; ++p) {
            float weight = weights[r * pages + p];
            const double exponent =
                double{items.factor} * items.likely(item, r, p) - plan.reference;
            if (unread_[p] > 0 && exponent > -kTailOctaves) {
                weight = counts[p] * std::exp2(static_cast<float>(exponent));
            }
            if (weight == 0) continue;
            total += weight;
            add_page_value(items, item, p, r, weight, out);
        }
    }
}

}  // namespace kvdb::indexes
