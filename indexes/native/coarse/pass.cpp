#include "pass.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "thread_pool.h"

namespace kvdb::indexes {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr double kNothing = -std::numeric_limits<double>::infinity();
constexpr double kTailOctaves = 40;   // below its largest weight a tail has nothing
constexpr std::int64_t kChunk = 256;  // tokens scored at a time
// A row reads no more than one in this many tokens, or what costs little anyway, unless the centers
// of pages ask for it.
constexpr std::int64_t kShare = 32;
constexpr std::int64_t kLittle = 4096;
// Where k are wanted and pages are guessed, so many times as many tokens are looked at.
constexpr int kCandidates = 8;
// What float32 sums may be wrong by, relative to the lengths of query and key.
constexpr float kRounding = 1e-5f;

}  // namespace

void LogSum::add(double other_exponent, double other_sum) {
    if (!(other_sum > 0)) return;
    if (!(sum > 0)) {
        *this = {other_exponent, other_sum};
    } else if (other_exponent <= exponent) {
        sum += other_sum * std::exp2(other_exponent - exponent);
    } else {
        *this = {other_exponent, other_sum + sum * std::exp2(exponent - other_exponent)};
    }
}

double LogSum::log2() const {
    return sum > 0 ? exponent + std::log2(sum) : kNothing;
}

// Of one item, while it is read.
struct Pass::Scratch {
    std::vector<std::uint8_t> selected;  // [pages]
    std::vector<std::uint64_t> tokens;   // a bit for each
    std::vector<std::int32_t> ids;
    std::vector<float> scores;  // [rows][kChunk]
    std::int32_t hits[kChunk];
    std::vector<float> unread;           // [pages] visible tokens of pages not selected
    std::vector<float> page_weights;     // [rows][pages], for the tail
    std::vector<std::uint16_t> page_of;  // [tokens], for the tail
    std::vector<float> q;                // [rows][head_dim]
};

Pass::Pass(const Blocks& blocks, const std::vector<Segment>& segments, const QueryRows& queries,
           const CoarseOptions& options, Tile& tile)
    : blocks_(blocks),
      segments_(segments),
      queries_(queries),
      options_(options),
      tile_(tile),
      kv_heads_(blocks.geometry.kv_heads),
      rows_(tile.rows),
      d_(blocks.geometry.head_dim),
      factor_(static_cast<float>(options.scale * kLog2E)) {}

Pass::Item Pass::item(std::int64_t number) const {
    const Segment& segment = segments_[number / kv_heads_];
    const int kv_head = static_cast<int>(number % kv_heads_);
    return {segment, kv_head, segment.pages->of(segment.number, kv_head),
            tile_.view(segment, kv_head), Visibility(queries_, segment)};
}

void Pass::run() {
    ThreadPool& pool = ThreadPool::instance();
    const int threads = pool.threads();
    thresholds.assign(static_cast<std::size_t>(kv_heads_) * rows_, kNone);
    page_thresholds_.assign(thresholds.size(), kNone);
    margins_.assign(thresholds.size(), options_.margin);
    seeds_.assign(thresholds.size(), {});
    references.assign(thresholds.size(), 0);
    sums.assign(items() * rows_, RowSums{});
    read.assign(items(), 0);
    hits.resize(threads);
    if (options_.tail) tails.assign(items() * rows_ * d_, 0);
    pool.run(items(), threads, [&](std::int64_t i, int) { scan(i); });
    pool.run(kv_heads_, threads, [&](std::int64_t h, int) { find_threshold(static_cast<int>(h)); });
    pool.run(items(), threads, [&](std::int64_t i, int slot) { read_item(i, hits[slot]); });
}

void Pass::scan(std::int64_t number) {
    const Item at = item(number);
    const Tile::View& view = at.view;
    const std::int64_t groups = view.pages / kPageGroup;
    for (std::int64_t i = 0; i < tile_.n; ++i) {
        at.visible.count(tile_.i0 + i, at.set, view.pages, view.counts + i * view.pages);
    }
    const float shift_norm = [&] {
        double sum = 0;
        for (int i = 0; i < d_; ++i) sum += double{at.set.shift[i]} * at.set.shift[i];
        return static_cast<float>(std::sqrt(sum));
    }();
    std::vector<ScanRow> rows(rows_);
    std::vector<float> most(std::size_t(rows_) * 2 * kPageGroup, kNone);
    std::vector<float> squares(std::size_t(rows_) * kPageGroup);
    for (int r = 0; r < rows_; ++r) {
        const CodedQuery& query = tile_.query(at.kv_head, r);
        double base = 0;
        for (int i = 0; i < d_; ++i) base += double{query.q[i]} * at.set.shift[i];
        rows[r] = {
            query.center,
            query.center,
            query.length,
            static_cast<float>(base),
            query.error * *at.set.norm + kRounding * query.norm * (*at.set.norm + shift_norm),
            view.counts + r % tile_.n * view.pages,
            view.middle(r),
            view.reach(r),
            view.priority_ ? view.priority_ + r * view.pages : nullptr,
            view.best(r),
            most.data() + r * 2 * kPageGroup,
            squares.data() + r * kPageGroup};
    }
    const Pages& pages = *at.segment.pages;
    coarse_kernels().scan({{at.set.center, at.set.center_scales, pages.center_dims()},
                           {at.set.farthest, at.set.farthest_scales, d_},
                           {at.set.radius, at.set.radius_scales, kChannelBlocks},
                           options_.margin,
                           groups,
                           rows.data(),
                           rows_});
    for (int r = 0; r < rows_; ++r) {
        const float* lanes = rows[r].most;
        RowSums& sum = sums[number * rows_ + r];
        sum.top = *std::max_element(lanes, lanes + kPageGroup) +
                  *std::max_element(lanes + kPageGroup, lanes + 2 * kPageGroup);
        double square = 0, tokens = 0;
        for (int lane = 0; lane < kPageGroup; ++lane) square += rows[r].squares[lane];
        for (std::int64_t p = 0; p < view.pages; ++p) tokens += rows[r].count[p];
        sum.curve = square > 0 ? static_cast<float>(variance(at, r) * tokens / square) : 0.0f;
    }
}

// What the tokens of a page add to its middle, were they spread like a normal distribution: half
// their variance. It is known for the segment as a whole, and taken to go with reach squared.
double Pass::variance(const Item& at, int r) const {
    const CodedQuery& query = tile_.query(at.kv_head, r);
    double sum = 0;
    for (int b = 0; b < kChannelBlocks; ++b) sum += double{query.blocks[b]} * at.set.spread[b];
    return sum * options_.scale / 2;
}

// The score of which a page's tokens have the mass, as the estimate has it.
float Pass::likely(const Item& at, int r, std::int64_t p) const {
    const std::int64_t number = (&at.segment - segments_.data()) * kv_heads_ + at.kv_head;
    const float reach = at.view.reach(r)[p];
    const float around = sums[number * rows_ + r].curve * reach * reach;
    return at.view.middle(r)[p] + std::min(around, reach);
}

void Pass::members(const Item& at, std::int64_t page, std::int64_t i,
                   std::vector<std::int32_t>& tokens) const {
    for (std::int64_t m = at.set.first[page]; m < at.set.first[page + 1]; ++m) {
        const std::int64_t member = at.set.member(m);
        if (at.visible.sees(i, member)) {
            tokens.push_back(static_cast<std::int32_t>(at.segment.begin + member));
        }
    }
}

std::vector<float> Pass::scores_of(int kv_head, int r,
                                   const std::vector<std::int32_t>& tokens) const {
    std::vector<float> scores(tokens.size());
    const auto count = static_cast<std::int64_t>(tokens.size());
    score_kernels().score[static_cast<int>(blocks_.geometry.dtype)](
        {blocks_, kv_head, tile_.query(kv_head, r).q, 1, tokens.data(), count, scores.data(), 0});
    return scores;
}

void Pass::find_threshold(int kv_head) {
    using Want = CoarseOptions::Want;
    for (int r = 0; r < rows_; ++r) {
        const std::size_t row = std::size_t(kv_head) * rows_ + r;
        if (options_.want == Want::range) {
            page_thresholds_[row] = thresholds[row] = range_threshold(kv_head, r);
        } else if (options_.want == Want::top_k) {
            thresholds[row] = top_k_threshold(kv_head, r);
            if (options_.exact) page_thresholds_[row] = thresholds[row];
        } else if (options_.want == Want::top_p) {
            page_thresholds_[row] = top_p_threshold(kv_head, r);
        }
        if (!options_.exact && options_.want == Want::range) narrow(kv_head, r);
        if (!options_.tail) continue;
        double reference = thresholds[row] == kNone ? kNothing : double{factor_} * thresholds[row];
        for (std::size_t s = 0; s < segments_.size(); ++s) {
            const std::int64_t number = std::int64_t(s) * kv_heads_ + kv_head;
            reference = std::max(reference, double{factor_} * sums[number * rows_ + r].top);
        }
        references[row] = reference;
    }
}

// Whether more than a share of all tokens lies in pages that reach the row's threshold.
bool Pass::excessive(int kv_head, int r, float margin) const {
    const float threshold = page_thresholds_[std::size_t(kv_head) * rows_ + r];
    std::int64_t pages = 0, reached = 0, tokens = 0;
    for (const Segment& segment : segments_) {
        const Tile::View view = tile_.view(segment, kv_head);
        pages += view.pages;
        tokens += segment.end - segment.begin;
        const float* best = view.best(r);
        for (std::int64_t g = 0; g < view.pages / kPageGroup; ++g) reached += best[g] >= threshold;
    }
    if (threshold == kNone || reached * kPageGroup * kShare <= pages) return false;
    double read = 0;
    for (const Segment& segment : segments_) {
        const Tile::View view = tile_.view(segment, kv_head);
        const float* counts = view.counts + r % tile_.n * view.pages;
        for (std::int64_t p = 0; p < view.pages; ++p) {
            read += view.priority(r, p, margin) >= threshold ? counts[p] : 0.0f;
        }
    }
    return read > double(std::max(kLittle, tokens / kShare));
}

// Gives pages less of their reach while too much would be read: a head that attends to a little of
// everything has nothing to find.
void Pass::narrow(int kv_head, int r) {
    float& margin = margins_[std::size_t(kv_head) * rows_ + r];
    for (const float share : {1.0f, 0.75f, 0.5f, 0.25f, 0.0f}) {
        margin = share * options_.margin;
        if (!excessive(kv_head, r, margin)) return;
    }
}

// The largest score of the tokens of the best page, and what lies beta below it.
float Pass::range_threshold(int kv_head, int r) {
    const CodedQuery& query = tile_.query(kv_head, r);
    float best = kNone;
    std::size_t best_segment = 0;
    std::int64_t best_group = 0;
    for (std::size_t s = 0; s < segments_.size(); ++s) {
        const Tile::View view = tile_.view(segments_[s], kv_head);
        for (std::int64_t g = 0; g < view.pages / kPageGroup; ++g) {
            if (view.best(r)[g] > best) {
                best = view.best(r)[g];
                best_segment = s;
                best_group = g;
            }
        }
    }
    float largest = queries_.floor[query.row];
    if (best > kNone) {
        const Item at = item(std::int64_t(best_segment) * kv_heads_ + kv_head);
        std::vector<std::int32_t> tokens;
        std::int64_t best_page = best_group * kPageGroup;
        for (std::int64_t p = best_page + 1; p < (best_group + 1) * kPageGroup; ++p) {
            const float priority = at.view.priority(r, p, margin(kv_head, r));
            if (priority > at.view.priority(r, best_page, margin(kv_head, r))) best_page = p;
        }
        members(at, best_page, query.i, tokens);
        seeds_[std::size_t(kv_head) * rows_ + r] = {best_segment, best_page};
        for (const float score : scores_of(kv_head, r, tokens)) largest = std::max(largest, score);
    }
    return largest - static_cast<float>(options_.parameter);
}

// The k-th largest score among the tokens of the best pages that hold k.
float Pass::top_k_threshold(int kv_head, int r) {
    struct Ranked {
        float priority;
        std::uint32_t segment, page;
    };
    const auto k = static_cast<std::int64_t>(options_.parameter);
    const CodedQuery& query = tile_.query(kv_head, r);
    std::vector<Ranked> pages;
    double visible = 0;
    for (std::size_t s = 0; s < segments_.size(); ++s) {
        const Tile::View view = tile_.view(segments_[s], kv_head);
        const float* counts = view.counts + r % tile_.n * view.pages;
        for (std::int64_t p = 0; p < view.pages; ++p) {
            visible += counts[p];
            if (counts[p] > 0) {
                pages.push_back(
                    {view.priority(r, p, margin(kv_head, r)), std::uint32_t(s), std::uint32_t(p)});
            }
        }
    }
    if (visible <= double(k)) return kNone;
    const auto wanted =
        options_.margin < 1 ? std::int64_t(std::min(visible, double(k) * kCandidates)) : k;
    std::vector<std::int32_t> tokens;
    float least = std::numeric_limits<float>::infinity();
    std::size_t take = std::min<std::size_t>(pages.size(), std::size_t(k) / 16 + 4);
    for (std::size_t taken = 0; std::int64_t(tokens.size()) < wanted;
         take = std::min(2 * take, pages.size())) {
        std::nth_element(pages.begin() + taken, pages.begin() + (take - 1), pages.end(),
                         [](const Ranked& a, const Ranked& b) { return a.priority > b.priority; });
        for (; taken < take; ++taken) {
            const Item at = item(std::int64_t{pages[taken].segment} * kv_heads_ + kv_head);
            members(at, pages[taken].page, query.i, tokens);
            least = std::min(least, pages[taken].priority);
        }
    }
    std::vector<float> scores = scores_of(kv_head, r, tokens);
    std::nth_element(scores.begin(), scores.begin() + (k - 1), scores.end(), std::greater<>());
    // Where that asks for too much, these pages must do.
    if (!options_.exact) {
        const std::size_t row = std::size_t(kv_head) * rows_ + r;
        page_thresholds_[row] = scores[k - 1];
        if (excessive(kv_head, r, margins_[row]) || least < scores[k - 1]) {
            page_thresholds_[row] = least;
        }
    }
    return scores[k - 1];
}

// The priority from which on pages hold somewhat more than the share p of the estimated mass.
float Pass::top_p_threshold(int kv_head, int r) const {
    constexpr int kBins = 1024;
    constexpr double kOctaves = 64;    // what lies lower weighs nothing
    if (options_.exact) return kNone;  // nothing may be overlooked
    float top = kNone;
    for (const Segment& segment : segments_) {
        const Tile::View view = tile_.view(segment, kv_head);
        const float* best = view.best(r);
        top = std::max(top, *std::max_element(best, best + view.pages / kPageGroup));
    }
    if (top == kNone) return kNone;
    std::vector<double> bins(kBins + 1);
    double total = 0;
    const double per_bin = kOctaves / kBins / factor_;
    for (std::size_t s = 0; s < segments_.size(); ++s) {
        const Item at = item(std::int64_t(s) * kv_heads_ + kv_head);
        const float* counts = at.view.counts + r % tile_.n * at.view.pages;
        for (std::int64_t p = 0; p < at.view.pages; ++p) {
            if (!(counts[p] > 0)) continue;
            const double exponent = factor_ * (double{likely(at, r, p)} - top);
            const double mass = counts[p] * std::exp2(exponent);
            const double bin = (double{top} - at.view.priority(r, p, margin(kv_head, r))) / per_bin;
            bins[static_cast<int>(std::min<double>(bin, kBins))] += mass;
            total += mass;
        }
    }
    const double outside = options_.outside[tile_.query(kv_head, r).row] * kLog2E;
    const double inside = total;
    total += std::exp2(std::min(outside - double{factor_} * top, 1000.0));
    const double wanted = total * (options_.parameter + 1) / 2;
    double sum = total - inside;
    for (int b = 0; b < kBins; ++b) {
        sum += bins[b];
        if (sum >= wanted) return top - static_cast<float>((b + 1) * per_bin);
    }
    return kNone;
}

void Pass::read_item(std::int64_t number, std::vector<Hit>& out) {
    thread_local Scratch scratch;
    const Item at = item(number);
    const bool any = select(at, scratch);
    scratch.page_weights.clear();
    if (options_.tail) {
        scratch.page_weights.assign(std::size_t(rows_) * at.view.pages, 0);
    }
    if (any) {
        collect(at, scratch);
        read[number] = std::int64_t(scratch.ids.size());
        score(at, scratch, number, out);
    }
    weigh(at, scratch, number);
    if (options_.tail) weigh_tail(at, scratch, number);
}

// Marks the pages that some row needs; all of them where reading one after the other costs less.
bool Pass::select(const Item& at, Scratch& scratch) const {
    const Tile::View& view = at.view;
    const std::int64_t tokens = at.segment.end - at.segment.begin;
    scratch.selected.assign(view.pages, options_.tight);
    std::int64_t count = options_.tight ? tokens : 0;
    const auto size = [&](std::int64_t p) { return at.set.first[p + 1] - at.set.first[p]; };
    for (int r = 0; r < rows_ && 4 * count <= tokens; ++r) {
        const float threshold = page_thresholds_[std::size_t(at.kv_head) * rows_ + r];
        const Seed& seed = seeds_[std::size_t(at.kv_head) * rows_ + r];
        if (seed.page >= 0 && &segments_[seed.segment] == &at.segment) {
            if (!scratch.selected[seed.page]) count += size(seed.page);
            scratch.selected[seed.page] = 1;
        }
        for (std::int64_t g = 0; g < view.pages / kPageGroup; ++g) {
            if (!(view.best(r)[g] >= threshold) || view.best(r)[g] == kNone) continue;
            for (std::int64_t p = g * kPageGroup; p < (g + 1) * kPageGroup; ++p) {
                const float priority = view.priority(r, p, margin(at.kv_head, r));
                if (scratch.selected[p] || !(priority >= threshold) || priority == kNone) continue;
                scratch.selected[p] = 1;
                count += size(p);
            }
        }
    }
    if (4 * count > tokens) std::fill(scratch.selected.begin(), scratch.selected.end(), 1);
    return count > 0;
}

// The tokens of the selected pages that some query sees, in order.
void Pass::collect(const Item& at, Scratch& scratch) const {
    const std::int64_t tokens = at.segment.end - at.segment.begin;
    scratch.tokens.assign((tokens + 63) / 64, 0);
    if (options_.tail) scratch.page_of.assign(tokens, 0);
    for (std::int64_t p = 0; p < at.view.pages; ++p) {
        if (!scratch.selected[p]) continue;
        for (std::int64_t m = at.set.first[p]; m < at.set.first[p + 1]; ++m) {
            const std::int64_t member = at.set.member(m);
            scratch.tokens[member / 64] |= std::uint64_t{1} << (member % 64);
            if (options_.tail) scratch.page_of[member] = static_cast<std::uint16_t>(p);
        }
    }
    std::int64_t begin = tokens, end = 0;
    for (std::int64_t i = tile_.i0; i < tile_.i0 + tile_.n; ++i) {
        if (at.visible.none(i)) continue;
        begin = std::min(begin, at.visible.begin(i));
        end = std::max(end, at.visible.end(i));
    }
    scratch.ids.clear();
    for (std::size_t word = 0; word < scratch.tokens.size(); ++word) {
        for (std::uint64_t bits = scratch.tokens[word]; bits; bits &= bits - 1) {
            const auto member = std::int64_t(word) * 64 + std::countr_zero(bits);
            const std::int64_t token = at.segment.begin + member;
            if (member < begin || member >= end || queries_.is_hidden(token)) continue;
            scratch.ids.push_back(static_cast<std::int32_t>(token));
        }
    }
}

// Exact scores of those tokens, for all rows at once; a hit where they reach the row's threshold.
void Pass::score(const Item& at, Scratch& scratch, std::int64_t number, std::vector<Hit>& out) {
    const auto kernel = score_kernels().score[static_cast<int>(blocks_.geometry.dtype)];
    scratch.scores.resize(rows_ * kChunk);
    scratch.q.resize(std::size_t(rows_) * d_);
    for (int r = 0; r < rows_; ++r) {
        std::copy_n(tile_.query(at.kv_head, r).q, d_, scratch.q.begin() + std::int64_t{r} * d_);
    }
    const auto total = std::int64_t(scratch.ids.size());
    for (std::int64_t c = 0; c < total; c += kChunk) {
        const std::int64_t count = std::min(kChunk, total - c);
        const std::int32_t* ids = scratch.ids.data() + c;
        kernel({blocks_, at.kv_head, scratch.q.data(), rows_, ids, count, scratch.scores.data(),
                kChunk});
        for (int r = 0; r < rows_; ++r) {
            const std::int64_t i = tile_.query(at.kv_head, r).i;
            const std::size_t row = std::size_t(at.kv_head) * rows_ + r;
            float* scores = scratch.scores.data() + r * kChunk;
            for (std::int64_t t = 0; t < count && !at.visible.whole(i); ++t) {
                if (!at.visible.sees(i, ids[t] - at.segment.begin)) scores[t] = kNone;
            }
            SiftItem sift{scores, count, thresholds[row], factor_, scratch.hits, 0, 0};
            coarse_kernels().sift(sift);
            const auto key = static_cast<std::uint32_t>(number * rows_ + r);
            for (std::int64_t hit = 0; hit < sift.hit_count; ++hit) {
                out.push_back({key, ids[scratch.hits[hit]], scores[scratch.hits[hit]]});
            }
            if (!(sift.others > 0)) continue;
            sums[number * rows_ + r].turned_down.add(double{factor_} * thresholds[row],
                                                     sift.others);
            if (!options_.tail) continue;
            float* weights = scratch.page_weights.data() + r * at.view.pages;
            for (std::int64_t t = 0; t < count; ++t) {
                const double exponent = double{factor_} * scores[t] - references[row];
                if (scores[t] >= thresholds[row] || exponent < -kTailOctaves) continue;
                weights[scratch.page_of[ids[t] - at.segment.begin]] +=
                    std::exp2(static_cast<float>(exponent));
            }
        }
    }
}

// The mass of the pages that were not read, estimated and bounded.
void Pass::weigh(const Item& at, Scratch& scratch, std::int64_t number) {
    const std::int64_t pages = at.view.pages;
    scratch.unread.resize(pages);
    float unread = 0;
    for (int r = 0; r < rows_; ++r) {
        if (r == 0 || tile_.n > 1) {
            const float* counts = at.view.counts + r % tile_.n * pages;
            unread = 0;
            for (std::int64_t p = 0; p < pages; ++p) {
                scratch.unread[p] = scratch.selected[p] ? 0.0f : counts[p];
                unread += scratch.unread[p];
            }
        }
        if (unread == 0) continue;
        RowSums& sum = sums[number * rows_ + r];
        MassItem mass{at.view.middle(r), at.view.reach(r), scratch.unread.data(), pages,
                      sum.curve,         factor_,          factor_ * sum.top};
        sum.missed.add(mass.reference, coarse_kernels().mass(mass));
        // What underflows is less than 2^-126 for each token.
        mass.curve = std::numeric_limits<float>::infinity();
        sum.bound.add(mass.reference, coarse_kernels().mass(mass) * 1.00001 + 1e-28);
    }
}

void Pass::add_page_value(const Item& at, std::int64_t page, std::int64_t i, float weight,
                          float* out) const {
    const float* counts = at.view.counts + (i - tile_.i0) * at.view.pages;
    if (counts[page] == static_cast<float>(at.set.first[page + 1] - at.set.first[page])) {
        coarse_kernels().add({at.set.values + page * d_, d_, weight, out});
        return;
    }
    // The mean value would tell of tokens that are not seen.
    std::vector<std::int32_t> tokens;
    members(at, page, i, tokens);
    std::vector<float> value(d_);
    for (const std::int32_t token : tokens) {
        score_kernels().widen_values[static_cast<int>(blocks_.geometry.dtype)](
            {blocks_, at.kv_head, token, 1, value.data()});
        for (int j = 0; j < d_; ++j) out[j] += weight / counts[page] * value[j];
    }
}

// The weight of each page's tokens that were not found, times its mean value.
void Pass::weigh_tail(const Item& at, Scratch& scratch, std::int64_t number) {
    const std::int64_t pages = at.view.pages;
    for (int r = 0; r < rows_; ++r) {
        const std::int64_t i = tile_.query(at.kv_head, r).i;
        const float* counts = at.view.counts + (i - tile_.i0) * pages;
        const double reference = references[std::size_t(at.kv_head) * rows_ + r];
        float* out = tails.data() + (number * rows_ + r) * d_;
        double& total = sums[number * rows_ + r].tail_weight;
        for (std::int64_t p = 0; p < pages; ++p) {
            float weight = scratch.page_weights[r * pages + p];
            const double exponent = double{factor_} * likely(at, r, p) - reference;
            if (!scratch.selected[p] && counts[p] > 0 && exponent > -kTailOctaves) {
                weight = counts[p] * std::exp2(static_cast<float>(exponent));
            }
            if (weight == 0) continue;
            total += weight;
            add_page_value(at, p, i, weight, out);
        }
    }
}

}  // namespace kvdb::indexes
