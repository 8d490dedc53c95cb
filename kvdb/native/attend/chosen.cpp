// Attention of each query over its own choice of tokens, which are read where they are.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "indexer.h"
#include "paged_memory.h"
#include "splits.h"
#include "thread_pool.h"

namespace kvdb {
namespace {

// The chosen tokens of one query as blocks.
//
// Where a value lies as far behind its block's first as its key does, a block that is seen from one
// of its tokens on is a block, too: nothing is copied. Otherwise tokens are copied together.
class ChosenRun {
  public:
    explicit ChosenRun(const AttendCall& call)
        : geometry_(call.geometry),
          run_(call.run),
          in_place_(!geometry_.own_values() || geometry_.symmetric()) {}

    void follow(const std::int32_t* ids, std::int64_t count) {
        table_.clear();
        counts_.clear();
        std::int64_t block = 0, begin = 0;  // the first token of it
        for (std::int64_t i = 0; i < count; ++i) {
            while (ids[i] >= begin + run_.counts[block]) begin += run_.counts[block++];
            const std::int64_t slot = ids[i] - begin;
            if (i > 0 && ids[i] == ids[i - 1] + 1 && slot > 0) {
                ++counts_.back();
                continue;
            }
            table_.push_back(run_.table[block] + slot * geometry_.key_row_bytes());
            counts_.push_back(1);
        }
        if (!in_place_) copy(ids, count);
    }

    Run run() const {
        return {table_.data(), counts_.data(), static_cast<std::int64_t>(table_.size())};
    }

  private:
    void copy(const std::int32_t* ids, std::int64_t count) {
        const std::int64_t size = geometry_.block_size, blocks = (count + size - 1) / size;
        memory_.resize(blocks * geometry_.block_bytes() + 64);
        const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
        std::byte* const to = memory_.data() + (64 - at % 64) % 64;
        require(ids, count);
        std::int64_t block = 0, begin = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            while (ids[i] >= begin + run_.counts[block]) begin += run_.counts[block++];
            const auto* from = reinterpret_cast<const std::byte*>(run_.table[block]);
            std::byte* const into = to + i / size * geometry_.block_bytes();
            const std::int64_t slot = ids[i] - begin, next = i % size;
            for (int head = 0; head < geometry_.kv_heads; ++head) {
                std::memcpy(into + geometry_.key_at(head, next),
                            from + geometry_.key_at(head, slot), geometry_.key_row_bytes());
                std::memcpy(into + geometry_.value_at(head, next),
                            from + geometry_.value_at(head, slot), geometry_.value_row_bytes());
            }
        }
        table_.resize(blocks);
        counts_.assign(blocks, static_cast<std::int32_t>(size));
        for (std::int64_t b = 0; b < blocks; ++b) {
            table_[b] = reinterpret_cast<std::uintptr_t>(to) + b * geometry_.block_bytes();
        }
        if (blocks > 0) counts_.back() = static_cast<std::int32_t>(count - (blocks - 1) * size);
    }

    // Blocks of which a token is chosen, whole.
    void require(const std::int32_t* ids, std::int64_t count) const {
        std::vector<std::int32_t> wanted(run_.blocks);
        std::int64_t begin = 0;
        const std::int32_t* const end = ids + count;
        for (std::int64_t b = 0; b < run_.blocks; begin += run_.counts[b++]) {
            ids = std::lower_bound(ids, end, begin);
            if (ids < end && *ids < begin + run_.counts[b]) wanted[b] = run_.counts[b];
        }
        require_blocks(geometry_, run_.table, wanted.data(), run_.blocks, 0, geometry_.kv_heads);
    }

    const Geometry& geometry_;
    const Run& run_;
    const bool in_place_;
    std::vector<std::uint64_t> table_;
    std::vector<std::int32_t> counts_;
    std::vector<std::byte> memory_;
};

void check_chosen(const AttendChosenCall& call) {
    check_attended(call.all);
    const std::int64_t tokens = count_tokens(call.all.geometry, call.all.run);
    check_raw(call.all.run);
    for (std::int64_t i = 0; i < call.all.n; ++i) {
        const std::int32_t found = call.found[i];
        if (found < 0 || found > call.ids_stride) {
            throw std::invalid_argument("found[" + std::to_string(i) + "] is " +
                                        std::to_string(found) + "; expected 0 to " +
                                        std::to_string(call.ids_stride));
        }
        const std::int32_t* ids = call.ids + i * call.ids_stride;
        for (std::int32_t j = 0; j < found; ++j) {
            if (ids[j] < (j > 0 ? ids[j - 1] + std::int64_t{1} : 0) || ids[j] >= tokens) {
                throw std::invalid_argument("ids[" + std::to_string(i) + ", " + std::to_string(j) +
                                            "] is " + std::to_string(ids[j]) +
                                            "; expected ascending tokens of the run, 0 to " +
                                            std::to_string(tokens - 1));
            }
        }
    }
}

// One query, and its logarithms where they are asked for.
void attend_one(const AttendChosenCall& call, std::int64_t i, ChosenRun& chosen, int threads) {
    chosen.follow(call.ids + i * call.ids_stride, call.found[i]);
    AttendCall one = call.all;
    const auto element = static_cast<std::int64_t>(one.geometry.element_bytes());
    const std::int64_t out_element = one.out_dtype == Dtype::float32 ? 4 : 2;
    one.n = 1;
    one.run = chosen.run();
    one.query.data = static_cast<std::byte*>(one.query.data) + i * one.query.token_stride * element;
    one.out.data = static_cast<std::byte*>(one.out.data) + i * one.out.token_stride * out_element;
    one.threads_max = threads;
    std::vector<float> logs(call.all.n > 1 && call.all.lse ? one.q_heads : 0);
    if (!logs.empty()) one.lse = logs.data();
    attend_uniform(one);
    for (std::size_t head = 0; head < logs.size(); ++head) {
        call.all.lse[head * call.all.n + i] = logs[head];
    }
}

}  // namespace

void attend_chosen(const AttendChosenCall& call) {
    check_chosen(call);
    const std::int64_t n = call.all.n;
    const int threads = ThreadPool::threads();
    if (n < 2 * threads) {  // each by all threads
        ChosenRun chosen(call.all);
        for (std::int64_t i = 0; i < n; ++i) attend_one(call, i, chosen, 0);
        return;
    }
    std::vector<ChosenRun> chosen(threads, ChosenRun(call.all));
    ThreadPool::instance().run(
        n, threads, [&](std::int64_t i, int slot) { attend_one(call, i, chosen[slot], 1); });
}

}  // namespace kvdb
