// size: one class: the steps of a layer.
#include "layer_steps.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <iterator>

#include "../pages/transfer.h"
#include "exact_steps.h"
#include "step_states.h"
#include "thread_pool.h"

namespace kvdb {
namespace {

using Clock = std::chrono::steady_clock;

// Tokens that are taken back unless they are kept.
class AppendedTokens {
  public:
    AppendedTokens() = default;
    AppendedTokens(const AppendedTokens&) = delete;
    AppendedTokens& operator=(const AppendedTokens&) = delete;
    ~AppendedTokens() {
        for (LayerSteps* layer : layers_) layer->take_back();
    }

    bool add(const TokenStep& token) {
        if (!token.layer->append(token)) return false;
        layers_.push_back(token.layer);
        return true;
    }
    void keep() { layers_.clear(); }

  private:
    std::vector<LayerSteps*> layers_;
};

// The answers to the queries of some tokens that were appended.
class Answers {
  public:
    Answers(const std::vector<TokenStep>& tokens, std::int64_t shared_tokens_min)
        : tokens_(tokens),
          shared_tokens_min_(shared_tokens_min),
          spent_(tokens.size()),
          shown_(tokens.size()) {}

    // Whether float32 could hold all of them.
    bool make() { return search() && read_whole() && finite(); }
    const StepTotals& spent(std::size_t i) const { return spent_[i]; }
    std::vector<StepObservation>& shown(std::size_t i) { return shown_[i]; }

  private:
    bool search() {
        std::vector<PlannedCall> calls;
        std::vector<std::size_t> numbers;
        for (std::size_t i = 0; i < tokens_.size(); ++i) {
            LayerSteps& layer = *tokens_[i].layer;
            const StepCourse& course = layer.course();
            if (!course.plan) {
                whole_.push_back(i);
                continue;
            }
            float* logs = layer.logs();
            calls.push_back({course.plan,
                             {tokens_[i].q, course.table, course.counts, course.blocks, 0,
                              layer.sinks(), tokens_[i].out, logs, logs + layer.q_heads,
                              logs + 2 * layer.q_heads, layer.observes_next(), Unlike::refused}});
            numbers.push_back(i);
        }
        if (calls.empty()) return true;
        const auto started = Clock::now();
        std::vector<StepResult> results = run_steps(calls);
        share_time(numbers, started);
        for (std::size_t number = 0; number < results.size(); ++number) {
            const StepResult& result = results[number];
            StepTotals& spent = spent_[numbers[number]];
            const bool refused = result.end == StepEnd::not_finite ||
                                 result.end == StepEnd::bound_exceeded ||
                                 result.end == StepEnd::unlike;
            if (refused) return false;
            spent.nbytes = result.nbytes;
            spent.search_ns = result.search_ns;
            spent.gather_ns = result.gather_ns;
            if (result.end == StepEnd::reads_everything) {
                whole_.push_back(numbers[number]);
                if (calls[number].call.observed) unshown_.emplace_back(numbers[number], result);
                continue;
            }
            if (calls[number].call.observed) show_answered(numbers[number], result);
            spent.scanned = result.scanned;
            spent.retrieved = result.retrieved;
            spent.missed = result.missed.mean;
            spent.bound = result.bound.mean;
            spent.bound_max = result.bound.largest;
        }
        return true;
    }

    bool read_whole() {
        if (whole_.empty()) return true;
        const auto started = Clock::now();
        std::vector<ExactStep> steps;
        for (const std::size_t i : whole_) {
            LayerSteps& layer = *tokens_[i].layer;
            const StepCourse& course = layer.course();
            const Placement* moved = course.placement ? &*course.placement : nullptr;
            steps.push_back({tokens_[i].q,
                             {course.table, course.counts, course.blocks, moved},
                             tokens_[i].out,
                             layer.logs(),
                             layer.observes_next() ? layer.logs() + 3 * layer.q_heads : nullptr,
                             layer.sinks(),
                             layer.window,
                             0});
        }
        const LayerSteps& first = *tokens_[0].layer;
        attend_steps(first.geometry, first.q_heads, first.scale, shared_tokens_min_, steps);
        share_time(whole_, started);
        for (std::size_t number = 0; number < steps.size(); ++number) {
            StepTotals& spent = spent_[whole_[number]];
            const LayerSteps& layer = *tokens_[whole_[number]].layer;
            spent.scanned = spent.retrieved =
                static_cast<double>(layer.seen_of(layer.tokens() + 1));
            spent.nbytes += steps[number].nbytes;
        }
        for (const auto& [i, result] : unshown_) {
            LayerSteps& layer = *tokens_[i].layer;
            const float* logs = layer.logs();
            shown_[i] = observations(*layer.course().plan, result, logs + 3 * layer.q_heads, logs);
        }
        return true;
    }

    // What a query showed that was answered by what was read and found.
    void show_answered(std::size_t i, const StepResult& result) {
        LayerSteps& layer = *tokens_[i].layer;
        const float *read = layer.logs() + layer.q_heads, *missed = read + layer.q_heads;
        std::vector<float> lse(layer.q_heads);
        for (int head = 0; head < layer.q_heads; ++head) {
            lse[head] = log_sum(read[head], missed[head]);
        }
        shown_[i] = observations(*layer.course().plan, result, nullptr, lse.data());
    }

    void share_time(const std::vector<std::size_t>& numbers, Clock::time_point started) {
        const auto spent =
            std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - started).count();
        for (const std::size_t i : numbers) {
            spent_[i].ns += spent / static_cast<std::int64_t>(numbers.size());
        }
    }

    bool finite() const {
        return std::all_of(tokens_.begin(), tokens_.end(), [](const TokenStep& token) {
            LayerSteps& layer = *token.layer;
            const int value_dim = layer.geometry.value_dim;
            return std::all_of(layer.logs(), layer.logs() + layer.q_heads,
                               [](float x) { return std::isfinite(x); }) &&
                   kvdb::finite(layer.geometry, layer.q_heads, 1, value_dim,
                                {token.out, value_dim, value_dim});
        });
    }

    const std::vector<TokenStep>& tokens_;
    const std::int64_t shared_tokens_min_;
    std::vector<std::size_t> whole_;  // the numbers of those that read everything
    std::vector<StepTotals> spent_;
    std::vector<std::vector<StepObservation>> shown_;
    std::vector<std::pair<std::size_t, StepResult>> unshown_;  // until everything was read
};

}  // namespace

LayerSteps::LayerSteps(const Geometry& geometry, int q_heads, float scale, std::int64_t window)
    : geometry(geometry),
      q_heads(q_heads),
      scale(scale),
      window(window),
      last_query_(q_heads * geometry.key_row_bytes()),
      logs_(4 * q_heads) {
    check_attendable(geometry);
}

bool LayerSteps::goes_on() const {
    return course_.steps > 0 && !full() &&
           std::all_of(course_.facts.begin(), course_.facts.end(),
                       [](const auto& fact) { return fact.first->value() == fact.second; });
}

int LayerSteps::threads() const {
    return course_.plan ? ThreadPool::threads() : attend_threads(geometry, seen_of(course_.tokens));
}

bool LayerSteps::append(const TokenStep& token) {
    std::int64_t last = course_.blocks - 1;
    begins_block_ = course_.counts[last] == geometry.block_size;
    if (begins_block_) ++last;
    if (!finite(geometry, q_heads, 1, geometry.head_dim, token.q) ||
        kvdb::append(geometry, {course_.table + last, 1}, course_.counts[last], 1, token.k,
                     token.v)) {
        return false;
    }
    ++course_.counts[last];
    course_.blocks = last + 1;
    return true;
}

void LayerSteps::take_back() {
    --course_.counts[course_.blocks - 1];
    if (begins_block_) --course_.blocks;
}

void LayerSteps::stop() {
    course_.steps = 0;
    keep_last(0);
}

void LayerSteps::keep_last(std::int64_t most) {
    recent_most_ = most;
    recent_next_ = 0;
    recent_.queries = std::vector<std::byte>(most * last_query_.size());
    recent_.answers = std::vector<std::byte>(most * answer_bytes());
}

RecentSteps LayerSteps::recent() const {
    const std::int64_t held = std::min(recent_next_, recent_most_);
    const std::int64_t first = held ? (recent_next_ - held) % recent_most_ : 0;
    const auto in_order = [&](const std::vector<std::byte>& ring, std::size_t each) {
        const auto bytes = static_cast<std::ptrdiff_t>(each);
        std::vector<std::byte> bits(ring.begin() + first * bytes, ring.begin() + held * bytes);
        bits.insert(bits.end(), ring.begin(), ring.begin() + first * bytes);
        return bits;
    };
    return {in_order(recent_.queries, last_query_.size()),
            in_order(recent_.answers, answer_bytes())};
}

void LayerSteps::sample_next(std::int64_t in, std::int64_t every) {
    sample_in_ = in;
    sample_every_ = every;
}

void LayerSteps::observe_next(std::int64_t asked, std::int64_t first, std::int64_t every) {
    asked_ = asked;
    observed_first_ = first;
    observed_every_ = every;
}

bool LayerSteps::observes_next() const {
    return asked_ >= 0 && course_.plan && course_.plan->observes() &&
           (asked_ < observed_first_ || (asked_ + 1) % observed_every_ == 0);
}

void LayerSteps::keep(const TokenStep& token, const StepTotals& spent,
                      std::vector<StepObservation> shown) {
    std::move(shown.begin(), shown.end(), std::back_inserter(observations_));
    if (asked_ >= 0) ++asked_;
    ++course_.tokens;
    --course_.steps;
    totals_.steps += 1;
    totals_.nbytes += spent.nbytes;
    totals_.ns += spent.ns;
    last_ns = spent.ns;
    totals_.search_ns += spent.search_ns;
    totals_.gather_ns += spent.gather_ns;
    totals_.tokens += course_.tokens;
    totals_.scanned += spent.scanned;
    totals_.retrieved += spent.retrieved;
    totals_.missed += spent.missed;
    totals_.bound += spent.bound;
    totals_.bound_max = std::max(totals_.bound_max, spent.bound_max);
    const std::size_t bytes = geometry.key_row_bytes();
    for (int head = 0; head < q_heads; ++head) {
        const std::int64_t at =
            head * token.q.head_stride * static_cast<std::int64_t>(geometry.element_bytes());
        std::memcpy(last_query_.data() + head * bytes,
                    static_cast<const std::byte*>(token.q.data) + at, bytes);
    }
    if (recent_most_ > 0) {
        const std::size_t at = recent_next_++ % recent_most_, answer = answer_bytes();
        std::memcpy(recent_.queries.data() + at * last_query_.size(), last_query_.data(),
                    last_query_.size());
        std::memcpy(recent_.answers.data() + at * answer, token.out, answer);
    }
    if (sample_every_ == 0 || sample_in_-- > 0) return;
    sample_in_ = sample_every_ - 1;
    samples_.push_back({totals_.steps - 1, last_query_});
}

bool take_steps(const std::vector<TokenStep>& tokens, std::int64_t shared_tokens_min) {
    AppendedTokens appended;
    for (const TokenStep& token : tokens) {
        if (!appended.add(token)) return false;
    }
    Answers answers(tokens, shared_tokens_min);
    if (!answers.make()) return false;
    appended.keep();
    for (std::size_t i = 0; i < tokens.size(); ++i)
        tokens[i].layer->keep(tokens[i], answers.spent(i), std::move(answers.shown(i)));
    return true;
}

}  // namespace kvdb
