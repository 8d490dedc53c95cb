#include "page_reader.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace kvdb::indexes::coarse {
namespace {

constexpr std::int64_t kTogether = 256;  // tokens scored at a time
constexpr double kFaint = 0x1p-60;       // of smaller sums terms may be below what a float holds

// The largest score below the threshold, kNone where there is none.
float largest_below(const float* scores, std::int64_t count, float threshold) {
    float largest = kNone;
    for (std::int64_t t = 0; t < count; ++t) {
        if (scores[t] < threshold) largest = std::max(largest, scores[t]);
    }
    return largest;
}

}  // namespace

std::int64_t PageReader::read(SearchState& state, const SegmentHead& item,
                              std::vector<Candidate>& candidates) {
    select(state, item);
    page_weights.clear();
    if (state.options.tail) page_weights.assign(std::size_t(state.rows) * item.view.pages, 0);
    if (pages.empty()) return 0;
    collect(state, item);
    score(state, item, candidates);
    reuse(state, item, candidates);
    return std::int64_t(ids_.size() + reused_.size());
}

void PageReader::ask(const SearchState& state, const SegmentHead& item, AskedRows& asked) {
    select(state, item);
    if (pages.empty()) return;
    collect(state, item);
    asked.add(item.kv_head, ids_.data(), std::int64_t(ids_.size()), false);
}

void PageReader::mark(const PageSet& set, std::int64_t page) {
    if (selected_[page]) return;
    selected_[page] = 1;
    pages.push_back(static_cast<std::int32_t>(page));
    members_ += set.first[page + 1] - set.first[page];
}

// Marks the pages that some row needs, or all pages where reading them in order costs less. Pages
// that were scored to rank their tokens are marked in any case, because they cost nothing more.
void PageReader::select(const SearchState& state, const SegmentHead& item) {
    const std::int64_t tokens = item.segment.end - item.segment.begin;
    selected_.assign(item.view.pages, 0);
    pages.clear();
    members_ = 0;
    if (state.dense[item.kv_head]) return;
    const ScoredPages& scored = state.scored[item.kv_head];
    for (std::int64_t p = 0; p < item.view.pages && !scored.begin.empty(); ++p) {
        if (scored.has(item.segment.page_offset + p)) mark(item.set, p);
    }
    for (int r = 0; r < state.rows && !state.options.tight && 4 * members_ <= tokens; ++r) {
        select_for(state, item, r);
    }
    if (!state.options.tight && 4 * members_ <= tokens) return;
    pages.resize(item.view.pages);
    std::iota(pages.begin(), pages.end(), 0);
}

void PageReader::select_for(const SearchState& state, const SegmentHead& item, int r) {
    const RowPlan& plan = state.plan(item.kv_head, r);
    if (plan.seed.page >= 0 && &state.segments[plan.seed.segment] == &item.segment) {
        mark(item.set, plan.seed.page);
    }
    if (plan.page_threshold == kNone) {
        const float* counts = state.counts(item.view, r);
        for (std::int64_t p = 0; p < item.view.pages; ++p) {
            if (counts[p] > 0) mark(item.set, p);
        }
        return;
    }
    const float* best = item.view.best(r);
    for (std::int64_t g = 0; g < item.view.pages / kPageGroup; ++g) {
        if (best[g] < plan.page_threshold) continue;
        std::uint32_t read = item.view.reaching(r, g, plan.margin, plan.page_threshold);
        for (; read; read &= read - 1) mark(item.set, g * kPageGroup + std::countr_zero(read));
    }
}

// The tokens of marked pages that some query sees and that have no score yet, in order.
void PageReader::collect(const SearchState& state, const SegmentHead& item) {
    const std::int64_t tokens = item.segment.end - item.segment.begin;
    tokens_.assign((tokens + 63) / 64, 0);
    if (state.options.tail) page_of_.assign(tokens, 0);
    const ScoredPages& scored = state.scored[item.kv_head];
    for (const std::int32_t p : pages) {
        if (scored.has(item.segment.page_offset + p)) continue;
        for (std::int64_t m = item.set.first[p]; m < item.set.first[p + 1]; ++m) {
            const std::int64_t member = item.set.member(m);
            tokens_[member / 64] |= std::uint64_t{1} << (member % 64);
            if (state.options.tail) page_of_[member] = static_cast<std::uint16_t>(p);
        }
    }
    const auto [begin, end] = item.visible.span(state.tile.i0, state.tile.n);
    ids_.clear();
    pages_of_ids_.clear();
    for (std::size_t word = 0; word < tokens_.size(); ++word) {
        for (std::uint64_t bits = tokens_[word]; bits; bits &= bits - 1) {
            const auto member = std::int64_t(word) * 64 + std::countr_zero(bits);
            const std::int64_t token = item.segment.begin + member;
            if (member < begin || member >= end || state.queries.is_hidden(token)) continue;
            ids_.push_back(static_cast<std::int32_t>(token));
            if (state.options.tail) pages_of_ids_.push_back(page_of_[member]);
        }
    }
}

// Exact scores of those tokens, for all rows at once.
void PageReader::score(SearchState& state, const SegmentHead& item,
                       std::vector<Candidate>& candidates) {
    const auto total = std::int64_t(ids_.size());
    scores_.resize(state.rows * kTogether);
    for (std::int64_t begin = 0; begin < total; begin += kTogether) {
        const std::int64_t count = std::min(kTogether, total - begin);
        state.score_all(item.kv_head, ids_.data() + begin, count, scores_.data(), kTogether);
        for (int r = 0; r < state.rows; ++r) {
            sift(state, item, r,
                 {ids_.data() + begin, pages_of_ids_.data() + begin, scores_.data() + r * kTogether,
                  count},
                 candidates);
        }
    }
}

// Splits the tokens that have scores already.
void PageReader::reuse(SearchState& state, const SegmentHead& item,
                       std::vector<Candidate>& candidates) {
    const ScoredPages& scored = state.scored[item.kv_head];
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
    for (int r = 0; r < state.rows && total > 0; ++r) {
        scores_.clear();
        const float* row = scored.row(r);
        each([&](std::int32_t, std::int32_t begin, std::int32_t count) {
            scores_.insert(scores_.end(), row + begin, row + begin + count);
        });
        for (std::int64_t t = 0; t < total; t += kTogether) {
            sift(state, item, r,
                 {reused_.data() + t, pages_of_reused_.data() + t, scores_.data() + t,
                  std::min(kTogether, total - t)},
                 candidates);
        }
    }
}

// Adds a candidate where a score reaches the row's threshold.
void PageReader::sift(SearchState& state, const SegmentHead& item, int r, const Chunk& chunk,
                      std::vector<Candidate>& candidates) {
    const auto [ids, page_of, scores, count] = chunk;
    const std::int64_t i = state.tile.query(item.kv_head, r).i;
    const RowPlan& plan = state.plan(item.kv_head, r);
    if (!item.visible.whole(i)) {
        for (std::int64_t t = 0; t < count; ++t) {
            if (!item.visible.sees(i, ids[t] - item.segment.begin)) scores[t] = kNone;
        }
    }
    std::int32_t positions[kTogether];
    float below[kTogether];
    float* const below_or_null = state.options.tail ? below : nullptr;
    SiftItem sift{
        scores, count, plan.threshold, plan.threshold, state.factor, positions, below_or_null,
        0,      0};
    coarse_kernels().sift(sift);
    if (sift.others < kFaint && sift.candidate_count < count) {
        const float largest = largest_below(scores, count, plan.threshold);
        if (largest > kNone) {
            sift.reference = largest;
            coarse_kernels().sift(sift);
        }
    }
    const auto key = static_cast<std::uint32_t>(item.number * state.rows + r);
    for (std::int64_t c = 0; c < sift.candidate_count; ++c) {
        candidates.push_back({key, ids[positions[c]], scores[positions[c]]});
    }
    if (sift.others == 0) return;
    RowSums& sums = state.sum(item, r);
    const double exponent = double{state.factor} * sift.reference;
    sums.dropped.add(exponent, sift.others);
    if (!state.options.tail) return;
    float* weights = page_weights.data() + r * item.view.pages;
    sums.raise_tail_reference(exponent, weights, item.view.pages);
    const auto share = static_cast<float>(std::exp2(exponent - sums.tail_reference));
    float sum = 0;  // of a run of one page
    for (std::int64_t t = 0; t < count; ++t) {
        sum += below[t];
        if (t + 1 < count && page_of[t + 1] == page_of[t]) continue;
        weights[page_of[t]] += share * sum;
        sum = 0;
    }
}

}  // namespace kvdb::indexes::coarse
