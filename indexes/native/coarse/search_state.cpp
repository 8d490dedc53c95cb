#include "search_state.h"

#include <algorithm>
#include <cmath>

#include "../score/kernels.h"

namespace kvdb::indexes::coarse {

void LogSum::add(double other_exponent, double other_sum) {
    const double none = -std::numeric_limits<double>::infinity();
    if (other_sum == 0 || (other_exponent == none && other_sum > 0)) return;
    if (!std::isfinite(exponent) || !std::isfinite(other_exponent) || !std::isfinite(other_sum)) {
        *this = {std::numeric_limits<double>::infinity(), 1};
        return;
    }
    if (!(sum > 0)) {
        *this = {other_exponent, other_sum};
    } else if (other_exponent <= exponent) {
        sum += other_sum * std::exp2(other_exponent - exponent);
    } else {
        *this = {other_exponent, other_sum + sum * std::exp2(exponent - other_exponent)};
    }
}

double LogSum::log2() const {
    return sum > 0 ? exponent + std::log2(sum) : -std::numeric_limits<double>::infinity();
}

void RowSums::raise_tail_reference(double exponent, float* weights, std::int64_t count) {
    if (exponent <= tail_reference) return;
    const double share = std::exp2(tail_reference - exponent);
    for (std::int64_t i = 0; i < count; ++i) weights[i] *= static_cast<float>(share);
    tail_weight *= share;
    tail_reference = exponent;
}

SearchState::SearchState(const Blocks& blocks, const std::vector<Segment>& segments,
                         const QueryRows& queries, const CoarseOptions& options, const Tile& tile)
    : blocks(blocks),
      segments(segments),
      queries(queries),
      options(options),
      tile(tile),
      kv_heads(blocks.geometry.kv_heads),
      rows(tile.rows),
      head_dim(blocks.geometry.head_dim),
      value_dim(blocks.geometry.value_dim),
      factor(static_cast<float>(options.scale * kLog2E)),
      active(queries.heads(kv_heads)),
      plans(static_cast<std::size_t>(kv_heads) * rows),
      sums(static_cast<std::size_t>(count()) * rows),
      dense(kv_heads),
      scored(kv_heads) {
    for (RowPlan& plan : plans) plan.margin = options.margin;
}

SegmentHead SearchState::at(std::int64_t number) const {
    const Segment& segment = segments[number / kv_heads];
    const int kv_head = static_cast<int>(number % kv_heads);
    return {number,
            segment,
            kv_head,
            segment.pages->of(segment.number, kv_head),
            tile.view(segment, kv_head),
            Visibility(queries, segment)};
}

void SearchState::members(const SegmentHead& item, std::int64_t page, std::int64_t i,
                          std::vector<std::int32_t>& tokens) const {
    const bool whole = item.visible.whole(i);
    for (std::int64_t m = item.set.first[page]; m < item.set.first[page + 1]; ++m) {
        const std::int64_t member = item.set.member(m);
        if (whole || item.visible.sees(i, member)) {
            tokens.push_back(static_cast<std::int32_t>(item.segment.begin + member));
        }
    }
}

void SearchState::members(const SegmentHead& item, std::int64_t page,
                          std::vector<std::int32_t>& tokens) const {
    const auto [begin, end] = item.visible.span(tile.i0, tile.n);
    for (std::int64_t m = item.set.first[page]; m < item.set.first[page + 1]; ++m) {
        const std::int64_t member = item.set.member(m), token = item.segment.begin + member;
        if (member < begin || member >= end || queries.is_hidden(token)) continue;
        tokens.push_back(static_cast<std::int32_t>(token));
    }
}

void SearchState::score_all(int kv_head, const std::int32_t* tokens, std::int64_t count,
                            float* scores, std::int64_t stride) const {
    std::vector<float> q(std::size_t(rows) * head_dim);
    for (int r = 0; r < rows; ++r) {
        std::copy_n(tile.query(kv_head, r).q, head_dim, q.begin() + std::int64_t{r} * head_dim);
    }
    score_tokens({blocks, kv_head, q.data(), rows, tokens, count, scores, stride});
}

std::vector<float> SearchState::scores_of(int kv_head, int r,
                                          const std::vector<std::int32_t>& tokens) const {
    std::vector<float> scores(tokens.size());
    const auto count = static_cast<std::int64_t>(tokens.size());
    score_tokens(
        {blocks, kv_head, tile.query(kv_head, r).q, 1, tokens.data(), count, scores.data(), 0});
    return scores;
}

}  // namespace kvdb::indexes::coarse
