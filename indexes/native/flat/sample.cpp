#include "sample.h"

#include <algorithm>
#include <cmath>

namespace kvdb::indexes::flat {
namespace {

constexpr int kEven = 32;       // tokens evenly spread
constexpr int kLongest = 1024;  // keys, at most

}  // namespace

Sample::Sample(const Batch& batch) : batch_(batch), scores_(batch.heads * batch.rows * kEven) {
    for (int s = 0; s < kEven && batch.begin < batch.end; ++s) {
        tokens_.push_back(static_cast<std::int32_t>(batch.begin + (batch.end - batch.begin) *
                                                                      (2 * s + 1) / (2 * kEven)));
    }
}

void Sample::score_sample(const Tile& tile, Scanner& scanner, Thresholds& thresholds) {
    std::vector<std::int32_t> tokens = tokens_;
    if (!thresholds.by_rank() && thresholds.options().beta < INFINITY) {
        const std::int64_t step = (batch_.chunks + kLongest - 1) / kLongest;
        for (std::int64_t c = 0; c < batch_.chunks; c += step) {
            const std::int32_t token =
                batch_.codes.longest[batch_.at(tile, batch_.first_chunk + c)];
            if (token >= batch_.begin && token < batch_.end) tokens.push_back(token);
        }
    }
    scanner.score(tile, tokens);
    for (int r = 0; r < tile.rows; ++r) {
        const std::int64_t row = tile.row(r), i = batch_.query_of(row);
        const float* scores = scanner.scores(r);
        std::copy_n(scores, kEven, &scores_[row * kEven]);
        if (thresholds.by_rank()) continue;
        for (std::size_t t = 0; t < tokens.size(); ++t) {
            if (batch_.queries.visible(i, tokens[t])) thresholds.raise(row, scores[t]);
        }
    }
}

double Sample::log_mean(std::int64_t row, double scale, float least) const {
    double largest = -INFINITY, sum = 0;
    int count = 0;
    const auto each = [&](auto&& body) {
        for (std::size_t s = 0; s < tokens_.size(); ++s) {
            const float score = scores_[row * kEven + s];
            if (batch_.queries.visible(batch_.query_of(row), tokens_[s]) && score < least) {
                body(scale * score);
            }
        }
    };
    each([&](double x) { largest = std::max(largest, x); });
    each([&](double x) {
        sum += std::exp(x - largest);
        ++count;
    });
    return count ? largest + std::log(sum / count) : scale * least;
}

}  // namespace kvdb::indexes::flat
