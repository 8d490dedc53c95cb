// size: one class, whose three retrievals share the ranking of pages.
#include "thresholds.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace kvdb::indexes::coarse {
namespace {

constexpr float kAll = std::numeric_limits<float>::infinity();
constexpr double kOctavesMax = 1000;  // a double holds so much
// A search for k tokens that guesses pages scores this many times as many tokens.
constexpr int kCandidates = 8;
constexpr std::size_t kPagesFirst = 16;  // looked at where a share of the mass is wanted

using Retrieval = CoarseOptions::Retrieval;

// Priorities for ranking, which has no order with NaN: a page whose priority is NaN is looked at
// first.
float page_rank(float priority) {
    return priority == priority ? priority : kAll;
}

}  // namespace

void Thresholds::ask(int kv_head, AskedRows& asked) const {
    if (state_.options.retrieval != Retrieval::range) return;
    std::vector<std::int32_t> tokens;
    for (int r = 0; r < state_.rows; ++r) {
        for (const bool middle : {false, true}) {
            const PageRef page = best_page(kv_head, r, middle, kNone);
            if (page.page < 0) continue;
            state_.members(state_.at(page.segment, kv_head), page.page,
                           state_.tile.query(kv_head, r).i, tokens);
        }
    }
    asked.add(kv_head, tokens.data(), std::int64_t(tokens.size()), false);
}

void Thresholds::find(int kv_head) {
    if (state_.options.retrieval == Retrieval::top_k) {
        top_k(kv_head);
    } else {
        for (int r = 0; r < state_.rows && !state_.dense[kv_head]; ++r) find_row(kv_head, r);
    }
    if (!state_.dense[kv_head]) density_.give_up(kv_head);
}

void Thresholds::find_row(int kv_head, int r) {
    RowPlan& plan = state_.plan(kv_head, r);
    const CoarseOptions& options = state_.options;
    if (options.retrieval == Retrieval::range) {
        plan.page_threshold = plan.threshold = range(kv_head, r);
        // A farthest key is a score that the page really has, while a margin is a guess.
        const bool guessed = state_.segments.empty() || !state_.segments[0].pages->all.farthest;
        if (!options.exact && guessed) density_.narrow(kv_head, r);
    } else if (options.retrieval == Retrieval::top_p && !options.exact) {
        top_p(kv_head, r);
    }
}

// The largest score among the tokens of the most promising pages, and the threshold beta below it.
// The page of the highest priority may just be a wide one, so the page of the highest middle is
// scored too.
float Thresholds::range(int kv_head, int r) {
    const float floor = state_.queries.floor[state_.tile.query(kv_head, r).row];
    float largest = kNone;
    for (const bool middle : {false, true}) {
        const PageRef page = best_page(kv_head, r, middle, largest);
        if (page.page >= 0) largest = std::max(largest, largest_of(kv_head, r, page, largest));
    }
    return std::max(largest, floor) - static_cast<float>(state_.options.parameter);
}

// Looks only at pages in groups whose best priority is above `least`, and by middles only at pages
// whose middle is: another is wide, but not likely to hold a larger score.
PageRef Thresholds::best_page(int kv_head, int r, bool middle, float least) const {
    const float margin = state_.plan(kv_head, r).margin;
    PageRef best;
    float most = middle ? least : kNone;
    for (std::size_t s = 0; s < state_.segments.size(); ++s) {
        const Tile::View view = state_.tile.view(state_.segments[s], kv_head);
        const float* groups = view.best(r);
        for (std::int64_t g = 0; g < view.pages / kPageGroup; ++g) {
            if (!(groups[g] > std::max(least, most))) continue;
            for (std::int64_t p = g * kPageGroup; p < (g + 1) * kPageGroup; ++p) {
                const float value = middle ? view.middle(r)[p] : view.priority(r, p, margin);
                if (!(value > most)) continue;
                most = value;
                best = {s, p};
            }
        }
    }
    return best;
}

// The largest score of a page's tokens; where it is more than `least`, the page is read in any
// case.
float Thresholds::largest_of(int kv_head, int r, const PageRef& page, float least) {
    std::vector<std::int32_t> tokens;
    state_.members(state_.at(page.segment, kv_head), page.page, state_.tile.query(kv_head, r).i,
                   tokens);
    float largest = kNone;
    for (const float score : state_.scores_of(kv_head, r, tokens)) {
        largest = std::max(largest, score);
    }
    if (largest > least) state_.plan(kv_head, r).seed = page;
    return largest;
}

std::vector<Thresholds::Ranked> Thresholds::visible_pages(int kv_head, int r) const {
    const float margin = state_.plan(kv_head, r).margin;
    std::vector<Ranked> pages;
    for (std::size_t s = 0; s < state_.segments.size(); ++s) {
        const Tile::View view = state_.tile.view(state_.segments[s], kv_head);
        const float* counts = state_.counts(view, r);
        for (std::int64_t p = 0; p < view.pages; ++p) {
            if (!(counts[p] > 0)) continue;
            const float priority = page_rank(view.priority(r, p, margin));
            const double most = double{view.middle(r)[p]} + view.reach(r)[p];
            pages.push_back({priority, view.rounding(r, p), std::uint32_t(s), std::uint32_t(p),
                             state_.factor * most + std::log2(double{counts[p]})});
        }
    }
    return pages;
}

float Thresholds::select_best(int kv_head, std::int64_t i, std::vector<Ranked>& pages,
                              std::size_t taken, std::size_t take,
                              std::vector<std::int32_t>& tokens) const {
    const auto higher = [](const Ranked& a, const Ranked& b) { return a.priority > b.priority; };
    std::nth_element(pages.begin() + taken, pages.begin() + (take - 1), pages.end(), higher);
    float least = kAll;
    for (std::size_t p = taken; p < take; ++p) {
        state_.members(state_.at(pages[p].segment, kv_head), pages[p].page, i, tokens);
        least = std::min(least, pages[p].priority - pages[p].rounding);
    }
    return least;
}

// Thresholds of every row: the k-th largest score among the tokens of the best pages that hold k.
void Thresholds::top_k(int kv_head) {
    const CoarseOptions& options = state_.options;
    if (options.parameter > density_.limit()) {
        state_.dense[kv_head] = 1;
        return;
    }
    std::vector<Best> best;
    for (int r = 0; r < state_.rows; ++r) best.push_back(best_pages(kv_head, r));
    score_together(kv_head, best);
    for (int r = 0; r < state_.rows && !state_.dense[kv_head]; ++r) {
        if (best[r].pages.empty()) continue;
        RowPlan& plan = state_.plan(kv_head, r);
        plan.page_threshold = plan.threshold = kth_score(kv_head, r, best[r]);
        if (options.exact) continue;
        // If that takes too many pages, these must do, unless the rest cannot be estimated.
        const float least = best[r].least;
        if (!density_.excessive(kv_head, r) && least >= plan.threshold) continue;
        plan.page_threshold = least;
        if (density_.means_mislead(kv_head, r)) state_.dense[kv_head] = 1;
    }
}

Thresholds::Best Thresholds::best_pages(int kv_head, int r) const {
    struct Page {
        float priority, count;
        std::uint32_t segment, page;
    };
    const auto k = double(state_.options.parameter);
    const float margin = state_.plan(kv_head, r).margin;
    std::vector<Page> pages;
    double visible = 0;
    for (std::size_t s = 0; s < state_.segments.size(); ++s) {
        const Tile::View view = state_.tile.view(state_.segments[s], kv_head);
        const float* counts = state_.counts(view, r);
        if (s == 0) pages.reserve(state_.segments.size() * view.pages);
        for (std::int64_t p = 0; p < view.pages; ++p) {
            if (!(counts[p] > 0)) continue;
            const float priority = page_rank(view.priority(r, p, margin));
            pages.push_back({priority, counts[p], std::uint32_t(s), std::uint32_t(p)});
            visible += counts[p];
        }
    }
    if (visible <= k) return {};
    const double target = margin < 1 ? std::min(visible, k * kCandidates) : k;
    // Takes as many of the best pages as usually hold k tokens, and twice as many until they do.
    const auto higher = [](const Page& a, const Page& b) { return a.priority > b.priority; };
    std::size_t ordered = 0;
    auto next = static_cast<std::size_t>(target * double(pages.size()) / visible) + 1;
    Best best{{}, kAll, 0};
    while (best.visible < target) {
        next = std::min(next, pages.size());
        const auto from = pages.begin() + ordered, to = pages.begin() + next;
        std::nth_element(from, to - 1, pages.end(), higher);
        std::sort(from, to, higher);
        for (; ordered < next && best.visible < target; ++ordered) {
            const Page& page = pages[ordered];
            best.pages.push_back({page.segment, page.page});
            best.least = page.priority;
            best.visible += page.count;
        }
        next *= 2;
    }
    return best;
}

// Scores the tokens of these pages for all rows at once; rows have many of them in common.
void Thresholds::score_together(int kv_head, const std::vector<Best>& best) {
    ScoredPages& scored = state_.scored[kv_head];
    const Segment* last = state_.segments.empty() ? nullptr : &state_.segments.back();
    const std::int64_t pages = last ? last->page_offset + last->pages->pages : 0;
    scored.begin.assign(pages, -1);
    scored.count.assign(pages, 0);
    for (const Best& of_row : best) {
        for (const PageRef& page : of_row.pages) {
            scored.begin[state_.segments[page.segment].page_offset + page.page] = 0;
        }
    }
    for (std::size_t s = 0; s < state_.segments.size(); ++s) {
        const SegmentHead item = state_.at(s, kv_head);
        for (std::int64_t p = 0; p < item.view.pages; ++p) {
            const std::int64_t page = item.segment.page_offset + p;
            if (scored.begin[page] < 0) continue;
            scored.begin[page] = static_cast<std::int32_t>(scored.tokens.size());
            state_.members(item, p, scored.tokens);
            scored.count[page] =
                static_cast<std::int32_t>(scored.tokens.size()) - scored.begin[page];
        }
    }
    const auto count = std::int64_t(scored.tokens.size());
    // All of these pages would be read: a margin rather guesses too much than too little.
    if (!state_.options.exact && double(count) > density_.limit()) {
        state_.dense[kv_head] = 1;
        return;
    }
    scored.scores.resize(state_.rows * count);
    state_.score_all(kv_head, scored.tokens.data(), count, scored.scores.data(), count);
}

float Thresholds::kth_score(int kv_head, int r, const Best& best) const {
    const ScoredPages& scored = state_.scored[kv_head];
    const float* row = scored.row(r);
    const std::int64_t i = state_.tile.query(kv_head, r).i;
    std::vector<Visibility> visibles;
    for (const Segment& segment : state_.segments) visibles.emplace_back(state_.queries, segment);
    std::vector<float> scores;
    scores.reserve(static_cast<std::size_t>(best.visible));
    for (const PageRef& page : best.pages) {
        const Segment& segment = state_.segments[page.segment];
        const Visibility& visible = visibles[page.segment];
        const std::int32_t begin = scored.begin[segment.page_offset + page.page];
        const std::int32_t end = begin + scored.count[segment.page_offset + page.page];
        if (visible.whole(i)) {
            scores.insert(scores.end(), row + begin, row + end);
            continue;
        }
        for (std::int32_t t = begin; t < end; ++t) {
            if (visible.sees(i, scored.tokens[t] - segment.begin)) scores.push_back(row[t]);
        }
    }
    const auto k = static_cast<std::int64_t>(state_.options.parameter);
    for (float& score : scores) score = score == score ? score : kNone;  // NaN has no order
    std::nth_element(scores.begin(), scores.begin() + (k - 1), scores.end(), std::greater<>());
    return scores[k - 1];
}

// An upper bound of the mass of the pages that are not taken, in units of 2^exponent; stops when it
// exceeds `stop`.
double Thresholds::rest(const std::vector<Ranked>& pages, std::size_t taken, double exponent,
                        double stop) const {
    double rest = 0;
    for (; taken < pages.size() && rest <= stop; ++taken) {
        rest += std::exp2(std::min(pages[taken].exponent - exponent, kOctavesMax));
    }
    return rest;
}

// Takes pages by their priority until their mass has a little more than the share p of itself and
// all the mass that the others may hold, so that the fewest tokens with the share p can be
// determined. If that never happens, all pages are read.
void Thresholds::top_p(int kv_head, int r) {
    const CodedQuery& query = state_.tile.query(kv_head, r);
    std::vector<Ranked> pages = visible_pages(kv_head, r);
    RowPlan& plan = state_.plan(kv_head, r);
    const double p = state_.options.parameter, more = (p + 1) / 2;
    LogSum retrieved;
    retrieved.add(state_.options.outside[query.row] * kLog2E, 1);
    std::size_t tokens = 0, taken = 0;
    float least = kAll;
    const auto enough = [&] {
        // Beside no mass at all, none of the rest is too little to count.
        if (!(retrieved.sum > 0) && taken < pages.size()) return false;
        const double spare = retrieved.sum * (1 - more) / more;
        const double rest = this->rest(pages, taken, retrieved.exponent, spare);
        if (!(rest <= spare)) return false;
        plan.page_threshold = least;
        // All tokens of less weight than this can be left out together: they are not among the
        // fewest.
        const double weight =
            (retrieved.sum - p * (retrieved.sum + rest)) / (2 * double(tokens) + 1);
        if (!(weight > 0)) return true;
        const double score = (std::log2(weight) + retrieved.exponent) / state_.factor;
        plan.threshold = static_cast<float>(score - 1e-6 * std::fabs(score));
        return true;
    };
    if (enough()) return;
    const double limit = density_.limit();
    while (taken < pages.size()) {
        const std::size_t take = std::min(std::max(kPagesFirst, 2 * taken), pages.size());
        std::vector<std::int32_t> ids;
        least = std::min(least, select_best(kv_head, query.i, pages, taken, take, ids));
        taken = take;
        for (const float score : state_.scores_of(kv_head, r, ids)) {
            retrieved.add(double{state_.factor} * score, 1);
        }
        tokens += ids.size();
        if (enough()) return;
        if (double(tokens) <= limit) continue;
        state_.dense[kv_head] = 1;
        return;
    }
}

}  // namespace kvdb::indexes::coarse
