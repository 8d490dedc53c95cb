// Builds pages: an item is one KV head of one segment.
#include <algorithm>
#include <numeric>

#include "clusters.h"
#include "representatives.h"
#include "thread_pool.h"

namespace kvdb::indexes::coarse {
namespace {

void make_runs(const Pages& pages, std::int64_t page_tokens, const PageSet& set) {
    for (std::int64_t p = 0; p <= pages.pages; ++p) {
        set.first[p] = static_cast<std::int32_t>(std::min(p * page_tokens, pages.tokens));
    }
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

void build(const Blocks& blocks, const Pages& pages, const ClusterOptions& options,
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
            order_members(cluster(keys, options).data(), pages.tokens, pages.pages, set);
        } else {
            make_runs(pages, page_tokens, set);
        }
        represent(blocks, pages, segment, kv_head, keys, set);
    });
}

}  // namespace kvdb::indexes::coarse
