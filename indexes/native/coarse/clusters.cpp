#include "clusters.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace kvdb::indexes::coarse {
namespace {

// A small random generator of our own, so that equal keys give equal clusters on every platform.
struct Random {
    std::uint64_t state = 0x9e3779b97f4a7c15;
    std::uint64_t below(std::uint64_t n) {
        state = state * 6364136223846793005 + 1442695040888963407;
        return (state >> 33) % n;
    }
};

// Lloyd's algorithm on the keys of one segment.
class KMeans {
  public:
    KMeans(const SegmentKeys& keys, std::int64_t clusters)
        : keys_(keys),
          d_(keys.head_dim),
          padded_((clusters + kStep - 1) / kStep * kStep),
          centers_(padded_ * d_),
          packed_(padded_ * d_),
          halves_(padded_),
          counts_(padded_),
          squares_(keys.tokens),
          nearest(keys.tokens),
          distances_(keys.tokens) {
        for (std::int64_t t = 0; t < keys.tokens; ++t) {
            float sum = 0;
            for (int i = 0; i < d_; ++i) sum += keys.key(t)[i] * keys.key(t)[i];
            squares_[t] = sum;
        }
    }

    // Starts `count` centroids at tokens chosen at random, each once.
    void seed(std::int64_t count) {
        std::vector<std::int32_t> tokens(keys_.tokens);
        std::iota(tokens.begin(), tokens.end(), 0);
        Random random;
        for (std::int64_t i = 0; i < count; ++i) {
            std::swap(tokens[i], tokens[i + random.below(tokens.size() - i)]);
            start(tokens[i]);
        }
    }

    // Starts `count` more at the tokens farthest from their centroid.
    void seed_far(std::int64_t count) {
        std::vector<std::int32_t> tokens(keys_.tokens);
        std::iota(tokens.begin(), tokens.end(), 0);
        const auto distance = [&](std::int32_t t) { return squares_[t] + 2 * distances_[t]; };
        std::partial_sort(tokens.begin(), tokens.begin() + count, tokens.end(),
                          [&](std::int32_t a, std::int32_t b) {
                              const float x = distance(a), y = distance(b);
                              return x != y ? x > y : a < b;
                          });
        for (std::int64_t i = 0; i < count; ++i) start(tokens[i]);
    }

    void assign() {
        std::fill(halves_.begin(), halves_.end(), std::numeric_limits<float>::infinity());
        for (std::int64_t c = 0; c < clusters_; ++c) {
            const float* center = centers_.data() + c * d_;
            float* packed = packed_.data() + c / kPageGroup * kPageGroup * d_ + c % kPageGroup;
            float sum = 0;
            for (int i = 0; i < d_; ++i) {
                sum += center[i] * center[i];
                packed[i * kPageGroup] = center[i];
            }
            halves_[c] = sum / 2;
        }
        const std::int64_t wide = (clusters_ + kStep - 1) / kStep * kStep;
        coarse_kernels().assign({keys_.keys.data(), packed_.data(), halves_.data(), keys_.tokens,
                                 wide, d_, nearest.data(), distances_.data()});
    }

    // Centroids become the means of their tokens; those without tokens stay where they are.
    void update() {
        std::fill(counts_.begin(), counts_.end(), 0);
        for (const std::int32_t c : nearest) ++counts_[c];
        for (std::int64_t c = 0; c < clusters_; ++c) {
            if (counts_[c]) std::fill_n(centers_.begin() + c * d_, d_, 0.0f);
        }
        for (std::int64_t t = 0; t < keys_.tokens; ++t) {
            float* center = centers_.data() + std::int64_t{nearest[t]} * d_;
            for (int i = 0; i < d_; ++i) center[i] += keys_.key(t)[i];
        }
        for (std::int64_t c = 0; c < clusters_; ++c) {
            const float share = counts_[c] ? 1.0f / static_cast<float>(counts_[c]) : 1.0f;
            for (int i = 0; i < d_; ++i) centers_[c * d_ + i] *= share;
        }
    }

  private:
    static constexpr std::int64_t kStep = 4 * kPageGroup;

    void start(std::int32_t token) {
        std::copy_n(keys_.key(token), d_, centers_.begin() + clusters_++ * d_);
    }

    const SegmentKeys& keys_;
    int d_;
    std::int64_t padded_, clusters_ = 0;
    std::vector<float> centers_, packed_, halves_;
    std::vector<std::int32_t> counts_;
    std::vector<float> squares_;

  public:
    std::vector<std::int32_t> nearest;  // [tokens]

  private:
    std::vector<float> distances_;
};

}  // namespace

std::vector<std::int32_t> cluster(const SegmentKeys& keys, const ClusterOptions& options) {
    KMeans means(keys, options.clusters);
    const auto far = static_cast<std::int64_t>(options.far * static_cast<float>(options.clusters));
    means.seed(options.clusters - far);
    for (int i = 0; i < options.iterations; ++i) {
        means.assign();
        means.update();
        if (i == 0) means.seed_far(far);
    }
    means.assign();
    return std::move(means.nearest);
}

}  // namespace kvdb::indexes::coarse
