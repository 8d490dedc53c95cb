// Decode steps of one layer of a session, from the caller's arrays to the answer: one token is
// appended, and its query answered, with nothing of Python between.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "step_observations.h"

namespace kvdb {

// Grows whenever a fact changes that plans depend on. From any thread.
class Version {
  public:
    std::int64_t value() const { return value_.load(std::memory_order_acquire); }
    void advance() { value_.fetch_add(1, std::memory_order_release); }

  private:
    std::atomic<std::int64_t> value_{0};
};

// How the next steps are carried out, and until when.
struct StepCourse {
    const StepPlan* plan;        // null where everything is read
    const std::uint64_t* table;  // of the run, and of blocks behind it that steps fill
    std::int32_t* counts;
    std::int64_t blocks;
    std::optional<Placement> placement;                          // of the run
    std::int64_t tokens;                                         // of the run
    std::int64_t steps;                                          // how many may be taken
    std::vector<std::pair<const Version*, std::int64_t>> facts;  // with the values they must have
};

// Sums over steps. tokens: of the runs that were asked.
struct StepTotals {
    std::int64_t steps = 0, nbytes = 0, ns = 0, search_ns = 0, gather_ns = 0, tokens = 0;
    double scanned = 0, retrieved = 0, missed = 0, bound = 0, bound_max = 0;
};

// A query that was kept, and how many steps since the last totals came before it.
struct SampledQuery {
    std::int64_t step;
    std::vector<std::byte> query;  // [q_heads][head_dim]
};

// Queries [tokens][q_heads][head_dim] and their answers [tokens][q_heads][value_dim].
struct RecentSteps {
    std::vector<std::byte> queries, answers;
};

// A token of one layer of one session. out: [q_heads][1][value_dim], contiguous. v: not looked at
// where tokens have no values of their own.
struct TokenStep {
    class LayerSteps* layer;
    Rows q, k, v;  // [q_heads][1][head_dim], [kv_heads][1][head_dim], [kv_heads][1][value_dim]
    void* out;
};

class LayerSteps {
  public:
    // window: a query sees the last so many tokens, its own among them; 0: all.
    LayerSteps(const Geometry& geometry, int q_heads, float scale, std::int64_t window);

    // [q_heads] a logit of each head, which weighs in the softmax and has no value; empty for none.
    void set_sinks(std::vector<float> sinks) { sinks_ = std::move(sinks); }
    const float* sinks() const { return sinks_.empty() ? nullptr : sinks_.data(); }
    // How many of so many tokens a query sees.
    std::int64_t seen_of(std::int64_t tokens) const {
        return window > 0 && window < tokens ? window : tokens;
    }

    void follow(StepCourse course) { course_ = std::move(course); }
    void stop();
    std::int64_t left() const { return course_.steps; }
    std::int64_t tokens() const { return course_.tokens; }
    // Whether both are layers of one model.
    bool like(const LayerSteps& other) const {
        return geometry == other.geometry && q_heads == other.q_heads && scale == other.scale;
    }
    // Whether what was kept of steps has to be taken before there are more.
    bool full() const {
        return samples_.size() >= kSamplesMax || observations_.size() >= kObservationsMax;
    }
    // Whether the next step may be taken.
    bool goes_on() const;
    // How many threads it may use.
    int threads() const;

    // Keeps the query of the step after `in` others, and then of every `every`-th; 0: of none.
    void sample_next(std::int64_t in, std::int64_t every);

    // Which queries are observed: the first `first` and every `every`-th, where `asked` came before
    // the next step; none where `asked` is negative.
    void observe_next(std::int64_t asked, std::int64_t first, std::int64_t every);
    // Whether the next one is.
    bool observes_next() const;

    // Keeps the last `most` queries and their answers, from now on until `stop`; 0: none.
    void keep_last(std::int64_t most);
    // Those that are kept, the oldest first, which go on being kept; out: the answers.
    RecentSteps recent() const;

    // What was done since the last time.
    StepTotals take_totals() { return std::exchange(totals_, {}); }
    std::vector<SampledQuery> take_samples() { return std::exchange(samples_, {}); }
    std::vector<StepObservation> take_observations() { return std::exchange(observations_, {}); }
    // [q_heads][head_dim], of the geometry's type.
    std::int64_t last_ns = 0;  // that the kernels of the last attend took, native or not
    const std::vector<std::byte>& last_query() const { return last_query_; }

    // The parts of a step, for `take_steps`. A token that was appended is kept or taken back.
    bool append(const TokenStep& token);  // false where a number is not finite
    void take_back();
    void keep(const TokenStep& token, const StepTotals& spent, std::vector<StepObservation> shown);

    const StepCourse& course() const { return course_; }
    float* logs() { return logs_.data(); }  // [4][q_heads]

    const Geometry geometry;
    const int q_heads;
    const float scale;
    const std::int64_t window;

  private:
    std::size_t answer_bytes() const { return q_heads * geometry.value_row_bytes(); }

    static constexpr std::size_t kSamplesMax = 16;  // more are not kept before they are taken
    static constexpr std::size_t kObservationsMax = 32;

    bool begins_block_ = false;  // the last token that was appended
    StepCourse course_{};
    StepTotals totals_;
    std::int64_t sample_in_ = 0, sample_every_ = 0;
    std::int64_t asked_ = -1, observed_first_ = 0, observed_every_ = 1;
    std::vector<StepObservation> observations_;
    std::vector<std::byte> last_query_;
    std::vector<SampledQuery> samples_;
    std::int64_t recent_most_ = 0, recent_next_ = 0;  // how many are kept, and how many were
    RecentSteps recent_;                              // a ring of them
    std::vector<float> logs_, sinks_;
};

// Appends a token of each session and answers its query: all of them or none. Where it returns
// false, because a number is not finite, a bound does not hold, or a query is unlike those for
// which its plan was proven, nothing has changed but `out`.
// `goes_on` must hold for each, geometry, q_heads and scale are those of all, and no layer comes
// twice. Blocks of so many tokens that several read whole are read once.
bool take_steps(const std::vector<TokenStep>& tokens, std::int64_t shared_tokens_min);

}  // namespace kvdb
