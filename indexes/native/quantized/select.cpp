#include "select.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace kvdb::indexes::quantized {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr int kRunsOfBlock = kBlock / kRun;

// The k-th largest; kNone where there are fewer.
float kth(std::vector<float>& values, std::size_t k) {
    if (k > values.size()) return kNone;
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<>());
    return values[k - 1];
}

std::int64_t count_at_least(const float* values, std::int64_t count, float least) {
    return quantized_kernels().count(values, count, least);
}

// A value that k of the values reach, and few more.
float near_kth(const float* values, std::int64_t count, std::int64_t k) {
    float high = quantized_kernels().most(values, count), low = high;
    for (float step = 1; count_at_least(values, count, low) < k; step *= 2) {
        if (!(step < 1e38f)) return kLowest;
        low = high - step;
    }
    for (int i = 0; i < 24; ++i) {
        const float middle = low + (high - low) / 2;
        const std::int64_t found = count_at_least(values, count, middle);
        if (found < k) high = middle;
        if (found >= k) low = middle;
        if (found >= k && found <= k + k / 8) break;
    }
    return low;
}

}  // namespace

Select::Select(Tile& tile, std::int64_t head, int r)
    : tile_(tile),
      row_(tile.row(head, r)),
      head_(head),
      r_(r),
      scores_(tile.scores(head, r)),
      largest_(tile.largest(head, r)),
      slack_(tile.slack(head, r)) {}

// The largest reach of a block of strata.
float Select::block_reach(std::int64_t block) const {
    const float* slack = slack_ + block * kRunsOfBlock;
    const float margin = tile_.options.margin;
    return margin > 0 ? margin * *std::max_element(slack, slack + kRunsOfBlock) : 0;
}

std::vector<std::int32_t> Select::candidates() const {
    float threshold = kNone;
    if (tile_.options.retrieval == SearchOptions::Retrieval::range) threshold = within_threshold();
    if (tile_.options.retrieval == SearchOptions::Retrieval::top_k) threshold = rank_threshold();
    if (tile_.options.retrieval == SearchOptions::Retrieval::top_p) threshold = share_threshold();
    std::vector<std::int32_t> tokens;
    if (tile_.options.margin <= 0) {
        add_all(std::max(threshold, kLowest), tokens);
        keep_best(tokens);
        return tokens;
    }
    for (std::int64_t block = 0; block < tile_.chunks * kChunk / kBlock; ++block) {
        const float least = std::max(threshold - block_reach(block), kLowest);
        for (std::int64_t s = block * kGroup; s < (block + 1) * kGroup; ++s) {
            if (largest_[s] >= least) add_of_stratum(s, threshold, tokens);
        }
    }
    std::sort(tokens.begin(), tokens.end());
    return tokens;
}

// The tokens that reach a score.
void Select::add_all(float least, std::vector<std::int32_t>& tokens) const {
    std::int32_t found[kChunk];
    for (std::int64_t chunk = 0; chunk < tile_.chunks; ++chunk) {
        const std::int64_t begin = chunk * kChunk;
        const std::int64_t count =
            quantized_kernels().collect(scores_ + begin, kChunk, least, found);
        for (std::int64_t i = 0; i < count; ++i) {
            tokens.push_back(static_cast<std::int32_t>(begin) + found[i]);
        }
    }
}

// Of the k largest no more than k by the scores that codes give, the first of equal ones.
void Select::keep_best(std::vector<std::int32_t>& tokens) const {
    const auto k = static_cast<std::size_t>(tile_.options.parameter);
    const bool ranked = tile_.options.retrieval == SearchOptions::Retrieval::top_k;
    if (!ranked || tile_.exact || tokens.size() <= k) return;
    std::vector<float> values(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) values[i] = scores_[tokens[i]];
    const float least = kth(values, k);
    std::size_t equal = k;
    for (const std::int32_t token : tokens) equal -= scores_[token] > least;
    std::erase_if(tokens, [&](std::int32_t token) {
        if (scores_[token] == least && equal > 0) return --equal, false;
        return !(scores_[token] > least);
    });
}

// The tokens of a stratum that may reach the threshold.
void Select::add_of_stratum(std::int64_t s, float threshold,
                            std::vector<std::int32_t>& tokens) const {
    const std::int64_t first = s / kGroup * kBlock + s % kGroup;
    for (std::int64_t t = first; t < first + kBlock; t += kGroup) {
        if (scores_[t] >= std::max(threshold - reach(t / kRun), kLowest)) {
            tokens.push_back(static_cast<std::int32_t>(t));
        }
    }
}

// The least score of the range, of which the upper end is known at least.
float Select::within_threshold() const {
    float top = tile_.queries.floor[row_.number];
    for (std::int64_t s = 0; s < tile_.chunks * kStrata; ++s) {
        top = std::max(top, largest_[s] - block_reach(s / kGroup));
    }
    return top - static_cast<float>(tile_.options.parameter);
}

// No more than the k-th largest score: k strata have a token that reaches it.
float Select::rank_threshold() const {
    const auto k = static_cast<std::int64_t>(tile_.options.parameter);
    const std::int64_t strata = tile_.chunks * kStrata;
    std::vector<float> values;
    const float* largest = largest_;
    if (tile_.options.margin > 0) {
        values.assign(largest_, largest_ + strata);
        for (std::int64_t s = 0; s < strata; ++s) values[s] -= block_reach(s / kGroup);
        largest = values.data();
    }
    if (count_at_least(largest, strata, kLowest) >= 2 * k) return near_kth(largest, strata, k);
    values.assign(scores_, scores_ + tile_.chunks * kChunk);
    for (std::size_t t = 0; t < values.size() && tile_.options.margin > 0; ++t) {
        values[t] -= reach(std::int64_t(t) / kRun);
    }
    return kth(values, std::size_t(k));
}

// The least score of the fewest tokens that have the share, by the scores that codes give.
float Select::share_threshold() const {
    std::vector<float> values;
    for (std::int64_t t = 0; t < tile_.chunks * kChunk; ++t) {
        if (scores_[t] > kNone) values.push_back(scores_[t]);
    }
    return cut(std::move(values), 0);
}

// Where the fewest scores end that have the share p of the mass: theirs, `rest` in units of
// 2^(factor * the largest of them), and what is outside.
float Select::cut(std::vector<float> scores, double rest) const {
    if (scores.empty()) return kNone;
    std::sort(scores.begin(), scores.end(), std::greater<>());
    const double factor = tile_.options.scale * kLog2E, top = factor * scores[0];
    double total = rest;
    for (const float score : scores) total += std::exp2(factor * score - top);
    const double outside = tile_.options.outside[row_.number] * kLog2E - top;
    // As a share of everything, for outside may weigh more than a double holds beside the top.
    const double unit = std::max(outside, 0.0);
    const double everything =
        unit + std::log2(total * std::exp2(-unit) + std::exp2(outside - unit));
    double share = std::exp2(outside - everything);
    std::size_t kept = 0;
    while (kept < scores.size() && share < tile_.options.parameter) {
        share += std::exp2(factor * scores[kept++] - top - everything);
    }
    return kept == 0 ? -kNone : scores[kept - 1];
}

// The mass of all tokens but the candidates, in units of 2^(factor * top).
double Select::rest_mass(const std::vector<std::int32_t>& candidates, float top) const {
    const double factor = tile_.options.scale * kLog2E;
    double rest = 0;
    std::size_t next = 0;
    for (std::int64_t t = 0; t < tile_.chunks * kChunk; ++t) {
        if (next < candidates.size() && candidates[next] == t) {
            ++next;
        } else if (scores_[t] > kNone) {
            rest += std::exp2(factor * (scores_[t] - top));
        }
    }
    return rest;
}

// Begins to read the value of a token, which the caller wants next.
void Select::fetch_value(std::int32_t token) const {
    const std::byte* value = tile_.blocks.value(tile_.heads[head_], token);
    const auto bytes = static_cast<std::int64_t>(tile_.blocks.geometry.key_row_bytes());
    for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(value + i);
}

// log2 of the mass outside and of the tokens retrieved.
float Select::known_mass() const {
    const float factor = tile_.options.scale * static_cast<float>(kLog2E);
    const float outside = tile_.options.outside[row_.number] * static_cast<float>(kLog2E);
    float most = outside;
    for (const float score : row_.scores) most = std::max(most, factor * score);
    if (!(most > kNone)) return kNone;
    float sum = std::exp2(outside - most);
    for (const float score : row_.scores) sum += std::exp2(factor * score - most);
    return most + std::log2(sum);
}

void Select::keep(const std::vector<std::int32_t>& candidates) {
    std::vector<float> exact(candidates.size());
    if (tile_.exact) {
        for (std::size_t i = 0; i < exact.size(); ++i) exact[i] = scores_[candidates[i]];
    } else {
        tile_.score(head_, r_, 1, candidates, exact.data(), 0);
    }
    const SearchOptions& options = tile_.options;
    float least = kNone;
    std::size_t equal = exact.size();  // of those that are kept
    if (options.retrieval == SearchOptions::Retrieval::range) {
        least = tile_.queries.floor[row_.number];
        for (const float score : exact) least = std::max(least, score);
        least -= static_cast<float>(options.parameter);
    } else if (options.retrieval == SearchOptions::Retrieval::top_k) {
        const auto k = static_cast<std::size_t>(options.parameter);
        if (exact.size() > k) {
            std::vector<float> values = exact;
            least = kth(values, k);
            equal = k;
            for (const float score : exact) equal -= score > least;
        }
    } else if (options.retrieval == SearchOptions::Retrieval::top_p && !exact.empty()) {
        const float top = *std::max_element(exact.begin(), exact.end());
        least = cut(exact, rest_mass(candidates, top));
    }
    for (std::size_t i = 0; i < candidates.size(); ++i) {
        const bool kept = exact[i] > least || (exact[i] == least && equal > 0);
        if (exact[i] == least && equal > 0) --equal;
        scores_[candidates[i]] = kept ? kNone : exact[i];
        if (!kept) continue;
        row_.ids.push_back(candidates[i]);
        fetch_value(candidates[i]);
        row_.scores.push_back(exact[i]);
    }
    row_.known = known_mass();
}

}  // namespace kvdb::indexes::quantized
