// Checks pages: an item is one KV head of one segment.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "representatives.h"
#include "thread_pool.h"

namespace kvdb::indexes::coarse {
namespace {

// The arrays of one KV head of one segment, to be computed anew.
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
        hold(set_.values, p * pages.value_dim);
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

bool members_are_complete(const Pages& pages, std::int64_t page_tokens, const PageSet& set) {
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

}  // namespace

bool verify(const Blocks& blocks, const Pages& pages, std::int64_t page_tokens) {
    std::atomic<bool> right{true};
    ThreadPool& pool = ThreadPool::instance();
    pool.run(pages.segments * pages.kv_heads, pool.threads(), [&](std::int64_t item, int) {
        const std::int64_t segment = item / pages.kv_heads;
        const int kv_head = static_cast<int>(item % pages.kv_heads);
        const PageSet set = pages.of(segment, kv_head);
        if (!members_are_complete(pages, page_tokens, set)) {
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

}  // namespace kvdb::indexes::coarse
