// size: one class, whose three retrievals share the ranking of pages.
#include "thresholds.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace kvdb::indexes {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kAll = std::numeric_limits<float>::infinity();
constexpr double kOctavesMax = 1000;  // a double holds so much
// Where k are wanted and pages are guessed, so many times as many tokens are looked at.
constexpr int kCandidates = 8;
// Where a share of the mass is wanted, so many tokens are looked at, or one in kLookedShare, before
// the estimate is trusted about the rest.
constexpr std::size_t kLooked = 4096, kLookedShare = 16;

using Want = CoarseOptions::Want;

}  // namespace

void Thresholds::find(int kv_head) {
    if (items_.options.want == Want::top_k) {
        top_k(kv_head);
    } else {
        for (int r = 0; r < items_.rows && !items_.dense[kv_head]; ++r) find_row(kv_head, r);
    }
    if (!items_.dense[kv_head]) density_.give_up(kv_head);
    for (int r = 0; r < items_.rows && items_.options.tail; ++r) find_reference(kv_head, r);
}

void Thresholds::find_row(int kv_head, int r) {
    RowPlan& plan = items_.plan(kv_head, r);
    const CoarseOptions& options = items_.options;
    if (options.want == Want::range) {
        plan.page_threshold = plan.threshold = range(kv_head, r);
        // A farthest key says what a page has, where a margin guesses.
        const bool guessed = items_.segments.empty() || !items_.segments[0].pages->all.farthest;
        if (!options.exact && guessed) density_.narrow(kv_head, r);
    } else if (options.want == Want::top_p && !options.exact) {
        plan.page_threshold = top_p(kv_head, r);
    }
}

void Thresholds::find_reference(int kv_head, int r) {
    RowPlan& plan = items_.plan(kv_head, r);
    const double factor = items_.factor;
    plan.reference = -std::numeric_limits<double>::infinity();
    if (plan.threshold != kNone && !items_.dense[kv_head]) plan.reference = factor * plan.threshold;
    for (std::size_t s = 0; s < items_.segments.size(); ++s) {
        const float top = items_.sum(items_.at(s, kv_head), r).top;
        plan.reference = std::max(plan.reference, factor * top);
    }
}

// The largest score of the tokens of the pages that promise most, and what lies beta below it. The
// page of the highest priority may only be a wide one, so that of the highest middle is asked too.
float Thresholds::range(int kv_head, int r) {
    const float floor = items_.queries.floor[items_.tile.query(kv_head, r).row];
    float largest = kNone;
    for (const bool middle : {false, true}) {
        const PageOf page = most_promising(kv_head, r, middle, largest);
        if (page.page >= 0) largest = std::max(largest, largest_of(kv_head, r, page, largest));
    }
    return std::max(largest, floor) - static_cast<float>(items_.options.parameter);
}

// Of the pages in groups whose best is above `least`.
PageOf Thresholds::most_promising(int kv_head, int r, bool middle, float least) const {
    const float margin = items_.plan(kv_head, r).margin;
    PageOf best;
    float most = kNone;
    for (std::size_t s = 0; s < items_.segments.size(); ++s) {
        const Tile::View view = items_.tile.view(items_.segments[s], kv_head);
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
float Thresholds::largest_of(int kv_head, int r, const PageOf& page, float least) {
    std::vector<std::int32_t> tokens;
    items_.members(items_.at(page.segment, kv_head), page.page, items_.tile.query(kv_head, r).i,
                   tokens);
    float largest = kNone;
    for (const float score : items_.scores_of(kv_head, r, tokens)) {
        largest = std::max(largest, score);
    }
    if (largest > least) items_.plan(kv_head, r).seed = page;
    return largest;
}

std::vector<Thresholds::Ranked> Thresholds::visible_pages(int kv_head, int r) const {
    const float margin = items_.plan(kv_head, r).margin;
    std::vector<Ranked> pages;
    for (std::size_t s = 0; s < items_.segments.size(); ++s) {
        const Tile::View view = items_.tile.view(items_.segments[s], kv_head);
        const float* counts = items_.counts(view, r);
        for (std::int64_t p = 0; p < view.pages; ++p) {
            if (!(counts[p] > 0)) continue;
            pages.push_back({view.priority(r, p, margin), std::uint32_t(s), std::uint32_t(p), 0});
        }
    }
    return pages;
}

float Thresholds::take_best(int kv_head, std::int64_t i, std::vector<Ranked>& pages,
                            std::size_t taken, std::size_t take,
                            std::vector<std::int32_t>& tokens) const {
    const auto higher = [](const Ranked& a, const Ranked& b) { return a.priority > b.priority; };
    std::nth_element(pages.begin() + taken, pages.begin() + (take - 1), pages.end(), higher);
    for (std::size_t p = taken; p < take; ++p) {
        items_.members(items_.at(pages[p].segment, kv_head), pages[p].page, i, tokens);
    }
    return pages[take - 1].priority;
}

// Thresholds of every row: the k-th largest score among the tokens of the best pages that hold k.
void Thresholds::top_k(int kv_head) {
    const CoarseOptions& options = items_.options;
    if (options.parameter > density_.limit()) {
        items_.dense[kv_head] = 1;
        return;
    }
    std::vector<Best> best;
    for (int r = 0; r < items_.rows; ++r) best.push_back(best_pages(kv_head, r));
    score_together(kv_head, best);
    for (int r = 0; r < items_.rows && !items_.dense[kv_head]; ++r) {
        if (best[r].pages.empty()) continue;
        RowPlan& plan = items_.plan(kv_head, r);
        plan.page_threshold = plan.threshold = kth_score(kv_head, r, best[r]);
        if (options.exact) continue;
        // Where that asks for too much, these pages must do.
        const float least = best[r].least;
        if (density_.excessive(kv_head, r) || least < plan.threshold) plan.page_threshold = least;
    }
}

Thresholds::Best Thresholds::best_pages(int kv_head, int r) const {
    struct Page {
        float priority, count;
        std::uint32_t segment, page;
    };
    const auto k = double(items_.options.parameter);
    const float margin = items_.plan(kv_head, r).margin;
    std::vector<Page> pages;
    double visible = 0;
    for (std::size_t s = 0; s < items_.segments.size(); ++s) {
        const Tile::View view = items_.tile.view(items_.segments[s], kv_head);
        const float* counts = items_.counts(view, r);
        if (s == 0) pages.reserve(items_.segments.size() * view.pages);
        for (std::int64_t p = 0; p < view.pages; ++p) {
            if (!(counts[p] > 0)) continue;
            pages.push_back(
                {view.priority(r, p, margin), counts[p], std::uint32_t(s), std::uint32_t(p)});
            visible += counts[p];
        }
    }
    if (visible <= k) return {};
    const double wanted = margin < 1 ? std::min(visible, k * kCandidates) : k;
    // The best pages of usual size that hold it, and twice as many until they do.
    const auto higher = [](const Page& a, const Page& b) { return a.priority > b.priority; };
    std::size_t ordered = 0;
    auto next = static_cast<std::size_t>(wanted * double(pages.size()) / visible) + 1;
    Best best{{}, kAll, 0};
    while (best.visible < wanted) {
        next = std::min(next, pages.size());
        const auto from = pages.begin() + ordered, to = pages.begin() + next;
        std::nth_element(from, to - 1, pages.end(), higher);
        std::sort(from, to, higher);
        for (; ordered < next && best.visible < wanted; ++ordered) {
            const Page& page = pages[ordered];
            best.pages.push_back({page.segment, page.page});
            best.least = page.priority;
            best.visible += page.count;
        }
        next *= 2;
    }
    return best;
}

// Scores the tokens of these pages for all rows at once; rows want many of them in common.
void Thresholds::score_together(int kv_head, const std::vector<Best>& best) {
    ScoredPages& scored = items_.scored[kv_head];
    const Segment* last = items_.segments.empty() ? nullptr : &items_.segments.back();
    const std::int64_t pages = last ? last->page_offset + last->pages->pages : 0;
    scored.begin.assign(pages, -1);
    scored.count.assign(pages, 0);
    for (const Best& of_row : best) {
        for (const PageOf& page : of_row.pages) {
            scored.begin[items_.segments[page.segment].page_offset + page.page] = 0;
        }
    }
    for (std::size_t s = 0; s < items_.segments.size(); ++s) {
        const Item item = items_.at(s, kv_head);
        for (std::int64_t p = 0; p < item.view.pages; ++p) {
            const std::int64_t page = item.segment.page_offset + p;
            if (scored.begin[page] < 0) continue;
            scored.begin[page] = static_cast<std::int32_t>(scored.tokens.size());
            items_.members(item, p, scored.tokens);
            scored.count[page] =
                static_cast<std::int32_t>(scored.tokens.size()) - scored.begin[page];
        }
    }
    const auto count = std::int64_t(scored.tokens.size());
    // All of them would be read, for a margin guesses too much rather than too little.
    if (!items_.options.exact && double(count) > density_.limit()) {
        items_.dense[kv_head] = 1;
        return;
    }
    scored.scores.resize(items_.rows * count);
    items_.score_all(kv_head, scored.tokens.data(), count, scored.scores.data(), count);
}

float Thresholds::kth_score(int kv_head, int r, const Best& best) const {
    const ScoredPages& scored = items_.scored[kv_head];
    const float* row = scored.row(r);
    const std::int64_t i = items_.tile.query(kv_head, r).i;
    std::vector<Visibility> visibles;
    for (const Segment& segment : items_.segments) visibles.emplace_back(items_.queries, segment);
    std::vector<float> scores;
    scores.reserve(static_cast<std::size_t>(best.visible));
    for (const PageOf& page : best.pages) {
        const Segment& segment = items_.segments[page.segment];
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
    const auto k = static_cast<std::int64_t>(items_.options.parameter);
    std::nth_element(scores.begin(), scores.begin() + (k - 1), scores.end(), std::greater<>());
    return scores[k - 1];
}

// Fills in the estimated masses; returns the exponent of 2 that is their unit.
double Thresholds::estimate(int kv_head, int r, std::vector<Ranked>& pages) const {
    double reference = kNone;
    for (std::size_t s = 0; s < items_.segments.size(); ++s) {
        const float top = items_.sum(items_.at(s, kv_head), r).top;
        reference = std::max(reference, double{items_.factor} * top);
    }
    for (Ranked& page : pages) {
        const Item item = items_.at(page.segment, kv_head);
        const double exponent = double{items_.factor} * items_.likely(item, r, page.page);
        page.mass = items_.counts(item.view, r)[page.page] * std::exp2(exponent - reference);
    }
    return reference;
}

// Looks at pages by their priority until what they hold has somewhat more than the share p of that
// and the estimated mass of the rest. Pages that are guessed too high are looked at early.
float Thresholds::top_p(int kv_head, int r) {
    const CodedQuery& query = items_.tile.query(kv_head, r);
    std::vector<Ranked> pages = visible_pages(kv_head, r);
    if (pages.empty()) return kNone;
    const double reference = estimate(kv_head, r, pages);
    const double outside = items_.options.outside[query.row] * kLog2E - reference;
    double had = std::exp2(std::min(outside, kOctavesMax)), rest = 0, looked = 0;
    for (const Ranked& page : pages) rest += page.mass;
    const double wanted = (items_.options.parameter + 1) / 2, outset = had;
    const auto enough = [&] { return had >= wanted * (had + rest); };
    if (enough()) return kAll;
    const double limit = density_.limit();
    const std::size_t most = std::max(kLooked, std::size_t(items_.blocks.tokens) / kLookedShare);
    std::size_t tokens = 0, take = std::min<std::size_t>(pages.size(), 16), taken = 0;
    while (taken < pages.size() && tokens <= most) {
        std::vector<std::int32_t> ids;
        const float least = take_best(kv_head, query.i, pages, taken, take, ids);
        for (; taken < take; ++taken) {
            rest -= pages[taken].mass;
            looked += pages[taken].mass;
        }
        for (const float score : items_.scores_of(kv_head, r, ids)) {
            had += std::exp2(std::min(double{items_.factor} * score - reference, kOctavesMax));
        }
        if (enough()) return least;
        tokens += ids.size();
        take = std::min(2 * take, pages.size());
        if (double(tokens) <= limit) continue;
        items_.dense[kv_head] = 1;
        return kNone;
    }
    // The rest is as the estimate says, by the ratio in which it was right so far.
    const double ratio = looked > 0 ? (had - outset) / looked : 1;
    std::sort(pages.begin() + taken, pages.end(),
              [](const Ranked& a, const Ranked& b) { return a.priority > b.priority; });
    rest = std::max(rest, 0.0) * ratio;
    for (; taken < pages.size(); ++taken) {
        had += pages[taken].mass * ratio;
        rest -= pages[taken].mass * ratio;
        if (enough()) return pages[taken].priority;
    }
    return kNone;
}

}  // namespace kvdb::indexes
