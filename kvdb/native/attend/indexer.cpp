#include "indexer.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "paged_memory.h"
#include "splits.h"
#include "thread_pool.h"
#include "workspace.h"

namespace kvdb {
namespace {

constexpr std::int64_t kScoredRows = 1024;    // for which keys are packed once: enough to hide it
constexpr std::int64_t kScoresMax = 1 << 24;  // that are kept at a time

// Of a run whose tokens are told by 32 bits.
std::int64_t checked_tokens(const Geometry& geometry, const Run& run) {
    check_raw(run);
    const std::int64_t tokens = count_tokens(geometry, run);
    if (tokens > std::numeric_limits<std::int32_t>::max()) {
        throw std::invalid_argument("the run has " + std::to_string(tokens) +
                                    " tokens; expected fewer than 2 ** 31");
    }
    return tokens;
}

// As integers that rise where floats do, and 0 as -0. What is no number is one of the ends.
std::uint32_t rank_of(float score) {
    const auto bits = std::bit_cast<std::uint32_t>(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The top-th largest rank of the scores, of which there are more than `top`, and how many are
// larger. ranks: memory for as many.
struct Least {
    std::uint32_t rank;
    std::int64_t larger;
};
Least least_of(const float* scores, std::int64_t count, std::int64_t top, std::uint32_t* ranks) {
    constexpr int kShift = 20, kBins = 1 << (32 - kShift), kCopies = 4;
    static_assert(kBins == 4096);
    std::vector<std::int32_t> bins(kBins * kCopies);  // copies, as equal neighbours would wait
    for (std::int64_t i = 0; i < count; ++i) {
        ++bins[(rank_of(scores[i]) >> kShift) * kCopies + i % kCopies];
    }
    std::int64_t larger = 0;
    std::uint32_t bin = kBins;
    for (;;) {
        const std::int32_t* copies = &bins[--bin * kCopies];
        const std::int64_t in_bin = std::accumulate(copies, copies + kCopies, std::int64_t{0});
        if (larger + in_bin >= top) break;
        larger += in_bin;
    }
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t rank = rank_of(scores[i]);
        ranks[kept] = rank;
        kept += rank >> kShift == bin;
    }
    const std::int64_t left = top - larger;
    std::nth_element(ranks, ranks + left - 1, ranks + kept, std::greater<>());
    const std::uint32_t rank = ranks[left - 1];
    const auto above = [rank](std::uint32_t one) { return one > rank; };
    return {rank, larger + std::count_if(ranks, ranks + left, above)};
}

std::int32_t choose(const float* scores, std::int64_t count, std::int64_t top, std::int32_t* ids,
                    std::uint32_t* ranks) {
    if (count <= top) {
        std::iota(ids, ids + count, 0);
        return static_cast<std::int32_t>(count);
    }
    if (top == 0) return 0;
    const Least least = least_of(scores, count, top, ranks);
    std::int64_t equal = top - least.larger, found = 0;
    for (std::int64_t i = 0; found < top; ++i) {
        const std::uint32_t rank = rank_of(scores[i]);
        const bool taken = rank > least.rank || (rank == least.rank && equal > 0);
        equal -= taken && rank == least.rank;
        ids[found] = static_cast<std::int32_t>(i);
        found += taken;
    }
    return static_cast<std::int32_t>(top);
}

std::int64_t queries_together(const IndexerCall& call, std::int64_t tokens) {
    const std::int64_t most =
        std::min(kScoredRows / call.heads, kScoresMax / std::max<std::int64_t>(tokens, 1));
    return std::min(std::max<std::int64_t>(most, 1), call.n);
}

// The keys of a call, and memory for some of its queries at a time.
class Indexer {
  public:
    explicit Indexer(const IndexerCall& call)
        : call_(call),
          geometry_(call.geometry),
          tokens_(checked_tokens(call.geometry, call.run)),
          together_(queries_together(call, tokens_)),
          threads_(attend_threads(call.geometry, tokens_ * (1 + together_ * call.heads / 16))),
          kernels_(current_kernels(Operation::prefill)) {
        if (call.geometry.kv_heads != 1) {
            throw std::invalid_argument("keys of an indexer are of " +
                                        std::to_string(call.geometry.kv_heads) +
                                        " KV heads; expected one");
        }
        geometry_.value_dim = 0;
        geometry_.values_in_keys = false;
        scratch_bytes_ =
            round_up(kernels_.score_scratch_bytes(geometry_, together_ * call.heads), 64);
        require_blocks(geometry_, call.run.table, call.run.counts, call.run.blocks, 0, 1);
    }

    void scores(float* out) {
        scratch_ = Workspace::of_this_thread().reserve(scratch_bytes_ * threads_);
        for (std::int64_t first = 0; first < call_.n; first += together_) {
            score(first, together(first), tokens_, out + first * tokens_);
        }
    }

    void select(std::int64_t top, std::int32_t* ids, std::int32_t* found) {
        if (call_.n > tokens_) {
            throw std::invalid_argument("there are queries of " + std::to_string(call_.n) +
                                        " tokens, more than the run's " + std::to_string(tokens_));
        }
        const std::int64_t chosen = std::min<std::int64_t>(threads_, together_);
        const std::int64_t each = round_up(tokens_, 16);
        scratch_ = Workspace::of_this_thread().reserve(scratch_bytes_ * threads_ +
                                                       4 * each * (together_ + chosen));
        auto* scores = reinterpret_cast<float*>(scratch_ + scratch_bytes_ * threads_);
        auto* ranks = reinterpret_cast<std::uint32_t*>(scores + together_ * each);
        for (std::int64_t first = 0; first < call_.n; first += together_) {
            const std::int64_t n = together(first);
            const std::int64_t own = tokens_ - call_.n + first + 1;  // that the first of them sees
            if (own + n - 1 > top) score(first, n, own + n - 1, scores, each);
            ThreadPool::instance().run(n, static_cast<int>(chosen), [&](std::int64_t i, int slot) {
                const std::int64_t query = first + i;
                found[query] =
                    choose(scores + i * each, own + i, top, ids + query * top, ranks + slot * each);
            });
        }
    }

  private:
    std::int64_t together(std::int64_t first) const { return std::min(together_, call_.n - first); }

    // Of n queries over the first `tokens` tokens.
    void score(std::int64_t first, std::int64_t n, std::int64_t tokens, float* out,
               std::int64_t out_stride = 0) const {
        std::int64_t parts = 1;
        if (threads_ > 1) {
            parts = std::clamp<std::int64_t>(threads_ * kItemsPerThread, 1,
                                             1 + tokens / kSplitTokensMin);
        }
        const std::vector<Split> splits = split_tokens(call_.run, {0, 0}, tokens, parts);
        const ScoreKernel kernel = kernels_.score[static_cast<int>(geometry_.dtype)];
        const auto items = static_cast<std::int64_t>(splits.size()) - 1;
        ThreadPool::instance().run(items, threads_, [&](std::int64_t part, int slot) {
            kernel({
                .geometry = geometry_,
                .run = call_.run,
                .block = splits[part].block,
                .token_begin = splits[part].token,
                .token_end = std::min(splits[part + 1].token, tokens),
                .queries = call_.queries + first * geometry_.head_dim,
                .weights = call_.weights + first,
                .query_stride = call_.n * geometry_.head_dim,
                .weight_stride = call_.n,
                .heads = call_.heads,
                .n = n,
                .out = out,
                .out_stride = out_stride ? out_stride : tokens_,
                .scratch = scratch_ + scratch_bytes_ * slot,
            });
        });
    }

    const IndexerCall& call_;
    Geometry geometry_;  // of keys alone
    const std::int64_t tokens_;
    const std::int64_t together_;  // queries whose scores are computed at a time
    const int threads_;
    const Kernels& kernels_;
    std::size_t scratch_bytes_;
    std::byte* scratch_ = nullptr;
};

}  // namespace

void indexer_scores(const IndexerCall& call, float* out) {
    if (call.n > 0) Indexer(call).scores(out);
}

void indexer_select(const IndexerCall& call, std::int64_t top, std::int32_t* ids,
                    std::int32_t* found) {
    if (call.n > 0) Indexer(call).select(top, ids, found);
}

}  // namespace kvdb
