#include "found_cut.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "step_states.h"

namespace kvdb {
namespace {

using indexes::SearchResult;

// The k-th largest score of a row over some results, -inf where there are fewer.
float kth_score(const std::vector<SearchResult*>& results, std::int64_t row, std::size_t k) {
    std::vector<float> scores;
    for (const SearchResult* result : results) {
        const auto& [offsets, ids, all] = result->retrieved;
        scores.insert(scores.end(), all.begin() + offsets[row], all.begin() + offsets[row + 1]);
    }
    if (scores.size() <= k) return -INFINITY;
    const auto at = scores.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(scores.begin(), at, scores.end(), std::greater<>());
    return *at;
}

// Leaves out scores below those of `least`, [rows].
void keep_from(SearchResult& result, const std::vector<float>& least, float scale) {
    auto& [offsets, ids, scores] = result.retrieved;
    std::int64_t kept = 0, begin = 0;
    for (std::size_t row = 0; row < least.size(); ++row) {
        const std::int64_t end = offsets[row + 1];
        double most = -INFINITY, mass = 0;
        for (std::int64_t i = begin; i < end; ++i) {
            if (!(scores[i] >= least[row])) most = std::max<double>(most, scores[i]);
        }
        for (std::int64_t i = begin; i < end; ++i) {
            if (scores[i] >= least[row]) {
                ids[kept] = ids[i];
                scores[kept++] = scores[i];
            } else {
                mass += std::exp(scale * (scores[i] - most));
            }
        }
        offsets[row + 1] = kept;
        begin = end;
        if (mass == 0) continue;
        const auto lost = static_cast<float>(scale * most + std::log(mass));
        result.missed[row] = log_sum(result.missed[row], lost);
        result.bound[row] = std::nextafter(log_sum(result.bound[row], lost), INFINITY);
    }
    ids.resize(kept);
    scores.resize(kept);
}

}  // namespace

void cut_found(const StepPlan& plan, const std::vector<float>& floor,
               std::vector<SearchResult>& found) {
    std::vector<StepCut> done;
    for (const StepSearch& first : plan.searches) {
        if (!first.cut || std::find(done.begin(), done.end(), *first.cut) != done.end()) continue;
        done.push_back(*first.cut);
        std::vector<SearchResult*> alike;
        for (std::size_t i = 0; i < found.size(); ++i) {
            if (plan.searches[i].cut == first.cut && found[i].tail.empty()) {
                alike.push_back(&found[i]);
            }
        }
        std::vector<float> least = floor;
        for (std::size_t row = 0; row < least.size(); ++row) {
            if (first.cut->kind == StepCut::Kind::range) {
                least[row] -= static_cast<float>(first.cut->parameter);
            } else {
                least[row] = kth_score(alike, static_cast<std::int64_t>(row),
                                       static_cast<std::size_t>(first.cut->parameter));
            }
        }
        for (SearchResult* result : alike) keep_from(*result, least, plan.scale);
    }
}

SearchResult without_heads(const SearchResult& result, const std::vector<std::uint8_t>& heads,
                           int group) {
    SearchResult kept;
    kept.retrieved.offsets.assign(1, 0);
    const auto rows = static_cast<std::int64_t>(heads.size()) * group;
    for (std::int64_t row = 0; row < rows; ++row) {
        const bool left = heads[row / group];
        const std::int64_t begin = result.retrieved.offsets[row];
        const std::int64_t end = left ? begin : result.retrieved.offsets[row + 1];
        const auto add = [&](const auto& from, auto& to) {
            to.insert(to.end(), from.begin() + begin, from.begin() + end);
        };
        add(result.retrieved.ids, kept.retrieved.ids);
        add(result.retrieved.scores, kept.retrieved.scores);
        kept.retrieved.offsets.push_back(kept.retrieved.offsets.back() + end - begin);
        kept.missed.push_back(left ? -INFINITY : result.missed[row]);
        kept.bound.push_back(left ? -INFINITY : result.bound[row]);
    }
    return kept;
}

}  // namespace kvdb
