#include "reading.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace kvdb::indexes {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kChunk = 256;  // tokens scored at a time

}  // namespace

std::int64_t Reading::read(Items& items, const Item& item, std::vector<Hit>& hits) {
    select(items, item);
    page_weights.clear();
    if (items.options.tail) page_weights.assign(std::size_t(items.rows) * item.view.pages, 0);
    if (pages.empty()) return 0;
    collect(items, item);
    score(items, item, hits);
    reuse(items, item, hits);
    return std::int64_t(ids_.size() + reused_.size());
}

void Reading::mark(const PageSet& set, std::int64_t page) {
    if (selected_[page]) return;
    selected_[page] = 1;
    pages.push_back(static_cast<std::int32_t>(page));
    members_ += set.first[page + 1] - set.first[page];
}

// Marks the pages that some row needs; all of them where reading one after the other costs less.
void Reading::select(const Items& items, const Item& item) {
    const std::int64_t tokens = item.segment.end - item.segment.begin;
    selected_.assign(item.view.pages, 0);
    pages.clear();
    members_ = 0;
    if (items.dense[item.kv_head]) return;
    for (int r = 0; r < items.rows && !items.options.tight && 4 * members_ <= tokens; ++r) {
        select_for(items, item, r);
    }
    if (!items.options.tight && 4 * members_ <= tokens) return;
    pages.resize(item.view.pages);
    std::iota(pages.begin(), pages.end(), 0);
}

void Reading::select_for(const Items& items, const Item& item, int r) {
    const RowPlan& plan = items.plan(item.kv_head, r);
    if (plan.seed.page >= 0 && &items.segments[plan.seed.segment] == &item.segment) {
        mark(item.set, plan.seed.page);
    }
    const float* best = item.view.best(r);
    for (std::int64_t g = 0; g < item.view.pages / kPageGroup; ++g) {
        if (!(best[g] >= plan.page_threshold) || best[g] == kNone) continue;
        for (std::int64_t p = g * kPageGroup; p < (g + 1) * kPageGroup; ++p) {
            const float priority = item.view.priority(r, p, plan.margin);
            if (priority >= plan.page_threshold && priority != kNone) mark(item.set, p);
        }
    }
}

// The tokens of the pages that some query sees and that have no score yet, in order.
void Reading::collect(const Items& items, const Item& item) {
    const std::int64_t tokens = item.segment.end - item.segment.begin;
    tokens_.assign((tokens + 63) / 64, 0);
    if (items.options.tail) page_of_.assign(tokens, 0);
    const ScoredPages& scored = items.scored[item.kv_head];
    for (const std::int32_t p : pages) {
        if (scored.has(item.segment.page_offset + p)) continue;
        for (std::int64_t m = item.set.first[p]; m < item.set.first[p + 1]; ++m) {
            const std::int64_t member = item.set.member(m);
            tokens_[member / 64] |= std::uint64_t{1} << (member % 64);
            if (items.options.tail) page_of_[member] = static_cast<std::uint16_t>(p);
        }
    }
    const auto [begin, end] = item.visible.span(items.tile.i0, items.tile.n);
    ids_.clear();
    pages_of_ids_.clear();
    for (std::size_t word = 0; word < tokens_.size(); ++word) {
        for (std::uint64_t bits = tokens_[word]; bits; bits &= bits - 1) {
            const auto member = std::int64_t(word) * 64 + std::countr_zero(bits);
            const std::int64_t token = item.segment.begin + member;
            if (member < begin || member >= end || items.queries.is_hidden(token)) continue;
            ids_.push_back(static_cast<std::int32_t>(token));
            if (items.options.tail) pages_of_ids_.push_back(page_of_[member]);
        }
    }
}

// Exact scores of those tokens, for all rows at once.
void Reading::score(Items& items, const Item& item, std::vector<Hit>& hits) {
    const auto total = std::int64_t(ids_.size());
    scores_.resize(items.rows * kChunk);
    for (std::int64_t begin = 0; begin < total; begin += kChunk) {
        const std::int64_t count = std::min(kChunk, total - begin);
        items.score_all(item.kv_head, ids_.data() + begin, count, scores_.data(), kChunk);
        for (int r = 0; r < items.rows; ++r) {
            sift(items, item, r,
                 {ids_.data() + begin, pages_of_ids_.data() + begin, scores_.data() + r * kChunk,
                  count},
                 hits);
        }
    }
}

// Those that have scores already.
void Reading::reuse(Items& items, const Item& item, std::vector<Hit>& hits) {
    const ScoredPages& scored = items.scored[item.kv_head];
    reused_.clear();
    pages_of_reused_.clear();
    const auto each = [&](auto&& body) {
        for (const std::int32_t p : pages) {
            const std::int64_t page = item.segment.page_offset + p;
            if (scored.has(page)) body(p, scored.begin[page], scored.count[page]);
        }
    };
    each([&](std::int32_t page, std::int32_t begin, std::int32_t count) {
        const auto from = scored.tokens.begin() + begin;
        reused_.insert(reused_.end(), from, from + count);
        pages_of_reused_.insert(pages_of_reused_.end(), count, static_cast<std::uint16_t>(page));
    });
    const auto total = std::int64_t(reused_.size());
    for (int r = 0; r < items.rows && total > 0; ++r) {
        scores_.clear();
        const float* row = scored.row(r);
        each([&](std::int32_t, std::int32_t begin, std::int32_t count) {
            scores_.insert(scores_.end(), row + begin, row + begin + count);
        });
        for (std::int64_t t = 0; t < total; t += kChunk) {
            sift(items, item, r,
                 {reused_.data() + t, pages_of_reused_.data() + t, scores_.data() + t,
                  std::min(kChunk, total - t)},
                 hits);
        }
    }
}

// A hit where a score reaches the row's threshold.
void Reading::sift(Items& items, const Item& item, int r, const Chunk& chunk,
                   std::vector<Hit>& hits) {
    const auto [ids, page_of, scores, count] = chunk;
    const std::int64_t i = items.tile.query(item.kv_head, r).i;
    const RowPlan& plan = items.plan(item.kv_head, r);
    if (!item.visible.whole(i)) {
        for (std::int64_t t = 0; t < count; ++t) {
            if (!item.visible.sees(i, ids[t] - item.segment.begin)) scores[t] = kNone;
        }
    }
    std::int32_t found[kChunk];
    float below[kChunk];
    float* const wanted = items.options.tail ? below : nullptr;
    SiftItem sift{scores, count, plan.threshold, items.factor, found, wanted, 0, 0};
    coarse_kernels().sift(sift);
    const auto key = static_cast<std::uint32_t>(item.number * items.rows + r);
    for (std::int64_t hit = 0; hit < sift.hit_count; ++hit) {
        hits.push_back({key, ids[found[hit]], scores[found[hit]]});
    }
    if (!(sift.others > 0)) return;
    items.sum(item, r).turned_down.add(double{items.factor} * plan.threshold, sift.others);
    if (!items.options.tail) return;
    float* weights = page_weights.data() + r * item.view.pages;
    const auto share =
        static_cast<float>(std::exp2(double{items.factor} * plan.threshold - plan.reference));
    float sum = 0;  // of a run of one page
    for (std::int64_t t = 0; t < count; ++t) {
        sum += below[t];
        if (t + 1 < count && page_of[t + 1] == page_of[t]) continue;
        weights[page_of[t]] += share * sum;
        sum = 0;
    }
}

}  // namespace kvdb::indexes
