#include "step.h"

#include <algorithm>
#include <chrono>

#include "joint_search.h"
#include "thread_pool.h"

namespace kvdb {
namespace {

using Clock = std::chrono::steady_clock;

std::int64_t nanoseconds(Clock::duration spent, std::size_t parts) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count() /
           static_cast<std::int64_t>(parts);
}

// Whether the tokens and KV heads that are asked for are the same, so that one call answers both.
bool asks_like(const StepSearch& one, const StepSearch& other) {
    return one.searcher->asks_like(*other.searcher) && one.begin == other.begin &&
           one.end == other.end && one.active_heads == other.active_heads &&
           one.hidden == other.hidden;
}

// body(i) for each of so many steps: on threads of their own where there are enough steps for all.
template <class Body>
void each(std::size_t count, Body&& body) {
    const int threads = ThreadPool::threads();
    const bool apart = count >= static_cast<std::size_t>(threads);
    ThreadPool::instance().run(static_cast<std::int64_t>(count), apart ? threads : 1,
                               [&](std::int64_t i, int) { body(static_cast<std::size_t>(i)); });
}

// Makes the next search of every step that has one. False where none has.
bool search_next(std::vector<StepRun>& steps, const std::vector<PlannedCall>& calls) {
    std::vector<std::vector<std::size_t>> alike;
    for (std::size_t i = 0; i < steps.size(); ++i) {
        if (!steps[i].next()) continue;
        const auto group = std::find_if(alike.begin(), alike.end(), [&](const auto& group) {
            const StepPlan& plan = *calls[i].plan;
            const auto rows = static_cast<int>(group.size() + 1) * plan.rows_of_head();
            return rows <= steps[i].next()->searcher->rows_together &&
                   calls[group[0]].plan->q_heads == plan.q_heads &&
                   asks_like(*steps[group[0]].next(), *steps[i].next());
        });
        if (group == alike.end()) {
            alike.push_back({i});
        } else {
            group->push_back(i);
        }
    }
    each(alike.size(), [&](std::size_t number) {
        std::vector<StepRun*> group;
        for (const std::size_t i : alike[number]) group.push_back(&steps[i]);
        search_together(group, *calls[alike[number][0]].plan);
    });
    return !alike.empty();
}

}  // namespace

std::vector<std::uint8_t> StepResult::given_up() const {
    std::vector<std::uint8_t> rows;
    for (const indexes::SearchResult& one : found) {
        rows.resize(one.dense.size());
        for (std::size_t row = 0; row < rows.size(); ++row) rows[row] |= one.dense[row];
    }
    return rows;
}

std::vector<StepResult> run_steps(const std::vector<PlannedCall>& calls) {
    std::vector<StepRun> steps;
    steps.reserve(calls.size());
    for (const PlannedCall& planned : calls) steps.emplace_back(*planned.plan, planned.call);
    each(calls.size(), [&](std::size_t i) { steps[i].begin(); });
    const auto begun = Clock::now();
    while (search_next(steps, calls)) {
    }
    const auto searched = Clock::now();
    std::vector<StepResult> results(calls.size());
    each(calls.size(), [&](std::size_t i) { results[i] = steps[i].finish(); });
    const auto gathered = Clock::now();
    for (StepResult& result : results) {
        result.search_ns = nanoseconds(searched - begun, calls.size());
        result.gather_ns = nanoseconds(gathered - searched, calls.size());
    }
    return results;
}

}  // namespace kvdb
