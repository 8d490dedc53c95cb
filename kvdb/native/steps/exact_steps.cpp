#include "exact_steps.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "../pages/quantize.h"
#include "thread_pool.h"

namespace kvdb {
namespace {

// Blocks [begin, end) of the first of some steps, which all of them read.
struct SharedBlocks {
    std::vector<std::size_t> steps;
    std::int64_t begin, end, tokens;
};

// Finds out who reads what with whom.
class Sharing {
  public:
    Sharing(const std::vector<ExactStep>& steps, std::int64_t tokens_min)
        : steps_(steps), tokens_min_(tokens_min) {
        std::vector<std::size_t> unmoved;
        for (std::size_t i = 0; i < steps.size(); ++i) {
            if (steps[i].run.placement || steps[i].window) {
                alone.push_back(blocks({i}, 0, steps[i].run.blocks));
            } else {
                unmoved.push_back(i);
            }
        }
        split(unmoved, 0, 0);
    }

    std::vector<SharedBlocks> shared;  // by two steps or more
    std::vector<SharedBlocks> alone;   // the end of each step's run, which may be empty

  private:
    // The steps have the same blocks in [0, at); those in [begin, at) are not given out yet.
    void split(const std::vector<std::size_t>& steps, std::int64_t begin, std::int64_t at) {
        std::map<std::pair<std::uint64_t, std::int32_t>, std::vector<std::size_t>> next;
        for (const std::size_t i : steps) {
            const Run& run = steps_[i].run;
            if (at < run.blocks && steps.size() > 1) {
                next[{run.table[at], run.counts[at]}].push_back(i);
            } else {
                alone.push_back(blocks({i}, begin, run.blocks));
            }
        }
        for (const auto& [block, same] : next) {
            if (same.size() == 1) {
                alone.push_back(blocks(same, begin, steps_[same[0]].run.blocks));
                continue;
            }
            std::int64_t end = at + 1;
            while (alike(same, end)) ++end;
            SharedBlocks common = blocks(same, begin, end);
            const bool pays = common.tokens >= tokens_min_;
            if (pays) shared.push_back(std::move(common));
            split(same, pays ? end : begin, end);
        }
    }

    bool alike(const std::vector<std::size_t>& steps, std::int64_t at) const {
        const Run& first = steps_[steps[0]].run;
        return std::all_of(steps.begin(), steps.end(), [&](std::size_t i) {
            const Run& run = steps_[i].run;
            return at < run.blocks && run.table[at] == first.table[at] &&
                   run.counts[at] == first.counts[at];
        });
    }

    SharedBlocks blocks(std::vector<std::size_t> steps, std::int64_t begin,
                        std::int64_t end) const {
        const std::int32_t* counts = steps_[steps[0]].run.counts;
        const std::int64_t tokens = std::accumulate(counts + begin, counts + end, std::int64_t{0});
        return {std::move(steps), begin, end, tokens};
    }

    const std::vector<ExactStep>& steps_;
    const std::int64_t tokens_min_;
};

// States [members][q_heads] of the steps that share blocks.
struct SharedState {
    std::vector<float> out, lse, top;
};

class ExactSteps {
  public:
    ExactSteps(const Geometry& geometry, int q_heads, float scale, std::vector<ExactStep>& steps)
        : geometry_(geometry), q_heads_(q_heads), scale_(scale), steps_(steps) {}

    void run(std::int64_t shared_tokens_min) {
        const Sharing sharing(steps_, shared_tokens_min);
        if (sharing.shared.empty()) {
            for (ExactStep& step : steps_) read_alone(step);
            return;
        }
        states_.resize(steps_.size());
        for (const SharedBlocks& blocks : sharing.shared) read(blocks);
        // What is left is short most often, so that a thread for each does more than all for one.
        const bool apart = std::all_of(
            sharing.alone.begin(), sharing.alone.end(),
            [&](const SharedBlocks& blocks) { return blocks.tokens <= kApartTokensMax; });
        ThreadPool::instance().run(static_cast<std::int64_t>(sharing.alone.size()),
                                   apart ? ThreadPool::threads() : 1, [&](std::int64_t i, int) {
                                       read(sharing.alone[i]);
                                       merge(sharing.alone[i].steps[0]);
                                   });
    }

  private:
    static constexpr std::int64_t kApartTokensMax = 2048;

    AttendCall call(const Rows& query, std::int64_t n, const Run& run) const {
        AttendCall call{};
        call.geometry = geometry_;
        call.query = query;
        call.q_heads = q_heads_;
        call.n = n;
        call.run = run;
        call.kv_end = geometry_.kv_heads;
        call.scale = scale_;
        return call;
    }

    // Answers a step that shares nothing, with the same arithmetic as if there were no others.
    void read_alone(ExactStep& step) const {
        const std::int64_t value_dim = geometry_.value_dim;
        AttendCall all = call(step.query, 1, step.run);
        all.out = {step.out, value_dim, value_dim};
        all.out_dtype = geometry_.dtype;
        all.lse = step.lse;
        all.top = step.top;
        all.sinks = step.sinks;
        all.window = step.window;
        attend(all);
        step.nbytes = payload_bytes(geometry_, seen_of(step));
    }

    // The blocks of its run that a step reads.
    static Run seen_of(const ExactStep& step) {
        Run seen = step.run;
        if (step.window == 0) return seen;
        std::int64_t tokens = 0, block = seen.blocks;
        while (block > 0 && tokens < step.window) tokens += seen.counts[--block];
        return {seen.table + block, seen.counts + block, seen.blocks - block};
    }

    // One call whose queries are those of all steps, as if they were tokens of one session.
    void read(const SharedBlocks& blocks) {
        const auto n = static_cast<std::int64_t>(blocks.steps.size());
        const std::int64_t head_dim = geometry_.head_dim, value_dim = geometry_.value_dim;
        const std::int64_t elements = q_heads_ * value_dim;
        const std::size_t bytes = geometry_.key_row_bytes();
        std::vector<std::byte> queries(n * q_heads_ * bytes);
        for (std::int64_t i = 0; i < n; ++i) {
            const Rows& query = steps_[blocks.steps[i]].query;
            for (std::int64_t head = 0; head < q_heads_; ++head) {
                const auto* from =
                    static_cast<const std::byte*>(query.data) +
                    head * query.head_stride * static_cast<std::int64_t>(geometry_.element_bytes());
                std::copy_n(from, bytes, queries.data() + (i * q_heads_ + head) * bytes);
            }
        }
        std::vector<float> out(n * elements), lse(n * q_heads_), top(n * q_heads_);
        const Run& run = steps_[blocks.steps[0]].run;
        AttendCall shared =
            call({queries.data(), head_dim, q_heads_ * head_dim}, n,
                 {run.table + blocks.begin, run.counts + blocks.begin, blocks.end - blocks.begin,
                  blocks.begin == 0 ? run.placement : nullptr});
        shared.out = {out.data(), value_dim, elements};
        shared.out_dtype = Dtype::float32;
        shared.lse = lse.data();
        shared.top = top.data();
        const ExactStep& first = steps_[blocks.steps[0]];
        shared.window = first.window;  // where there is one, the step is alone
        attend(shared);
        const std::int64_t nbytes =
            payload_bytes(geometry_, first.window ? seen_of(first) : shared.run);
        for (std::int64_t i = 0; i < n; ++i) {
            SharedState state;
            state.out.assign(out.begin() + i * elements, out.begin() + (i + 1) * elements);
            for (std::int64_t head = 0; head < q_heads_; ++head) {
                state.lse.push_back(lse[head * n + i]);
                state.top.push_back(top[head * n + i]);
            }
            states_[blocks.steps[i]].push_back(std::move(state));
            steps_[blocks.steps[i]].nbytes += nbytes / n;
        }
    }

    // The answer of a step from its states, of which there is one at least.
    void merge(std::size_t number) {
        const std::vector<std::int64_t> none(q_heads_ + 1);
        const ExactStep& step = steps_[number];
        std::vector<SharedState>& states = states_[number];
        for (std::size_t i = 0; i < states.size(); ++i) {
            const bool last = i + 1 == states.size();
            SharedState& first = states[0];
            AttendRetrievedCall merged{};
            merged.geometry = geometry_;
            merged.q_heads = q_heads_;
            merged.n = 1;
            merged.offsets = none.data();
            merged.scale = scale_;
            merged.state_out = first.out.data();
            merged.state_lse = first.lse.data();
            merged.tail_out = i > 0 ? states[i].out.data() : nullptr;
            merged.tail_lse = i > 0 ? states[i].lse.data() : nullptr;
            merged.out = last ? step.out : first.out.data();
            merged.out_dtype = last ? geometry_.dtype : Dtype::float32;
            merged.sinks = last ? step.sinks : nullptr;
            merged.lse = last ? step.lse : first.lse.data();
            attend_retrieved(merged);
        }
        for (int head = 0; step.top && head < q_heads_; ++head) {
            step.top[head] = -INFINITY;
            for (const SharedState& state : states) {
                step.top[head] = std::max(step.top[head], state.top[head]);
            }
        }
    }

    const Geometry& geometry_;
    const int q_heads_;
    const float scale_;
    std::vector<ExactStep>& steps_;
    std::vector<std::vector<SharedState>> states_;  // of each step
};

}  // namespace

void attend_steps(const Geometry& geometry, int q_heads, float scale,
                  std::int64_t shared_tokens_min, std::vector<ExactStep>& steps) {
    for (ExactStep& step : steps) step.nbytes = 0;
    ExactSteps(geometry, q_heads, scale, steps).run(shared_tokens_min);
}

}  // namespace kvdb
