// Builds and checks pages: an item is one KV head of one segment.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>

#include "represent.h"
#include "thread_pool.h"

namespace kvdb::indexes {
namespace {

// A small generator of our own: equal keys give equal clusters everywhere.
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

    // Centroids become the means of their tokens; those without any stay.
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

void cut_runs(const Pages& pages, std::int64_t page_tokens, const PageSet& set) {
    for (std::int64_t p = 0; p <= pages.pages; ++p) {
        set.first[p] = static_cast<std::int32_t>(std::min(p * page_tokens, pages.tokens));
    }
}

// The arrays of one KV head of one segment, to derive anew.
class Copy {
  public:
    Copy(const Pages& pages, const PageSet& set) : set_(set) {
        const std::int64_t p = pages.pages, d = pages.head_dim;
        hold(set_.center, p * pages.center_dims());
        hold(set_.center_scales, p);
        hold(set_.farthest, p * d);
        hold(set_.farthest_scales, p);
        hold(set_.radius, p * kChannelBlocks);
        hold(set_.radius_scales, p);
        hold(set_.values, p * d);
        hold(set_.shift, d);
        hold(set_.spread, kChannelBlocks);
        hold(set_.norm, 1);
    }
    const PageSet& set() const { return set_; }
    bool same() const {
        return std::all_of(held_.begin(), held_.end(), [](const Held& held) {
            return std::memcmp(held.bytes.data(), held.original, held.bytes.size()) == 0;
        });
    }

  private:
    struct Held {
        std::vector<std::byte> bytes;
        const void* original;
    };
    template <class T>
    void hold(T*& array, std::int64_t count) {
        if (!array) return;
        held_.push_back({std::vector<std::byte>(count * sizeof(T)), array});
        array = reinterpret_cast<T*>(held_.back().bytes.data());
    }

    PageSet set_;
    std::vector<Held> held_;
};

bool members_are_whole(const Pages& pages, std::int64_t page_tokens, const PageSet& set) {
    if (!set.members) {
        for (std::int64_t p = 0; p <= pages.pages; ++p) {
            if (set.first[p] != std::min(p * page_tokens, pages.tokens)) return false;
        }
        return true;
    }
    std::vector<bool> seen(pages.tokens);
    for (std::int64_t p = 0; p < pages.pages; ++p) {
        for (std::int64_t m = set.first[p]; m < set.first[p + 1]; ++m) {
            if (seen[set.members[m]]) return false;
            if (m > set.first[p] && set.members[m] < set.members[m - 1]) return false;
            seen[set.members[m]] = true;
        }
    }
    return true;
}

// Fills `first` and `members`: the tokens of each cluster one behind the other.
template <class Cluster>
void order_members(const Cluster* nearest, std::int64_t tokens, std::int64_t pages,
                   const PageSet& set) {
    std::fill_n(set.first, pages + 1, 0);
    for (std::int64_t t = 0; t < tokens; ++t) ++set.first[nearest[t] + 1];
    std::partial_sum(set.first, set.first + pages + 1, set.first);
    std::vector<std::int32_t> next(set.first, set.first + pages);
    for (std::int64_t t = 0; t < tokens; ++t) {
        set.members[next[nearest[t]]++] = static_cast<std::uint16_t>(t);
    }
}

}  // namespace

void cluster(const SegmentKeys& keys, const ClusterOptions& options, std::int64_t pages,
             const PageSet& set) {
    KMeans means(keys, options.clusters);
    const auto far = static_cast<std::int64_t>(options.far * static_cast<float>(options.clusters));
    means.seed(options.clusters - far);
    for (int i = 0; i < options.iterations; ++i) {
        means.assign();
        means.update();
        if (i == 0) means.seed_far(far);
    }
    means.assign();
    order_members(means.nearest.data(), keys.tokens, pages, set);
}

void build_pages(const Blocks& blocks, const Pages& pages, const ClusterOptions& options,
                 std::int64_t page_tokens, const std::uint16_t* nearest) {
    ThreadPool& pool = ThreadPool::instance();
    pool.run(pages.segments * pages.kv_heads, pool.threads(), [&](std::int64_t item, int) {
        const std::int64_t segment = item / pages.kv_heads;
        const int kv_head = static_cast<int>(item % pages.kv_heads);
        const PageSet set = pages.of(segment, kv_head);
        const SegmentKeys keys(blocks, kv_head, pages.begin + segment * pages.tokens, pages.tokens);
        if (set.members && nearest) {
            order_members(nearest + item * pages.tokens, pages.tokens, pages.pages, set);
        } else if (set.members) {
            cluster(keys, options, pages.pages, set);
        } else {
            cut_runs(pages, page_tokens, set);
        }
        represent(blocks, pages, segment, kv_head, keys, set);
    });
}

bool verify_pages(const Blocks& blocks, const Pages& pages, std::int64_t page_tokens) {
    std::atomic<bool> right{true};
    ThreadPool& pool = ThreadPool::instance();
    pool.run(pages.segments * pages.kv_heads, pool.threads(), [&](std::int64_t item, int) {
        const std::int64_t segment = item / pages.kv_heads;
        const int kv_head = static_cast<int>(item % pages.kv_heads);
        const PageSet set = pages.of(segment, kv_head);
        if (!members_are_whole(pages, page_tokens, set)) {
            right = false;
            return;
        }
        const SegmentKeys keys(blocks, kv_head, pages.begin + segment * pages.tokens, pages.tokens);
        const Copy copy(pages, set);
        represent(blocks, pages, segment, kv_head, keys, copy.set());
        if (!copy.same()) right = false;
    });
    return right;
}

}  // namespace kvdb::indexes
