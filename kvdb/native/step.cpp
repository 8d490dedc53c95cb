#include "step.h"

#include <algorithm>
#include <chrono>

#include "step_run.h"
#include "thread_pool.h"

namespace kvdb {
namespace {

using indexes::QueryRows;
using indexes::SearchResult;
using Clock = std::chrono::steady_clock;

std::int64_t nanoseconds(Clock::time_point since) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - since).count();
}

// Whether the tokens and KV heads that are asked for are the same, so that one call answers both.
bool asks_like(const StepSearch& one, const StepSearch& other) {
    return one.searcher->asks_like(*other.searcher) && one.begin == other.begin &&
           one.end == other.end && one.active_heads == other.active_heads &&
           one.hidden == other.hidden;
}

// What a search found for one of the n queries of each head.
SearchResult result_of(const SearchResult& all, std::int64_t q_heads, std::int64_t n,
                       std::int64_t query) {
    SearchResult own;
    own.scanned = all.scanned / n;
    own.nbytes = all.nbytes / n;
    const std::size_t dims = all.tail.size() / (q_heads * n);
    for (std::int64_t head = 0; head < q_heads; ++head) {
        const std::int64_t row = head * n + query;
        const auto copy = [](const auto& from, auto& to, std::int64_t begin, std::int64_t end) {
            to.insert(to.end(), from.begin() + begin, from.begin() + end);
        };
        const std::int64_t begin = all.retrieved.offsets[row], end = all.retrieved.offsets[row + 1];
        copy(all.retrieved.ids, own.retrieved.ids, begin, end);
        copy(all.retrieved.scores, own.retrieved.scores, begin, end);
        own.retrieved.offsets.push_back(static_cast<std::int64_t>(own.retrieved.ids.size()));
        own.missed.push_back(all.missed[row]);
        own.bound.push_back(all.bound[row]);
        if (!all.dense.empty()) own.dense.push_back(all.dense[row]);
        copy(all.tail, own.tail, row * dims, (row + 1) * dims);
    }
    return own;
}

// The next search of some steps, which ask alike, as one call.
void search(const std::vector<StepRun*>& steps, const StepPlan& plan) {
    const auto started = Clock::now();
    const auto n = static_cast<std::int64_t>(steps.size());
    const std::int64_t rows = plan.q_heads, dim = plan.geometry.head_dim;
    std::vector<float> query(rows * n * dim), floor(rows * n), outside(rows * n);
    for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t row = 0; row < rows; ++row) {
            std::copy_n(steps[i]->query() + row * dim, dim, query.data() + (row * n + i) * dim);
            floor[row * n + i] = steps[i]->floor()[row];
            outside[row * n + i] = steps[i]->outside()[row];
        }
    }
    const StepSearch& part = *steps[0]->next();
    const auto* active = reinterpret_cast<const bool*>(part.active_heads.data());
    const std::vector<std::int64_t> begin(n, part.begin), end(n, part.end);
    const QueryRows queries{query.data(),        n,
                            plan.rows_of_head(), begin.data(),
                            end.data(),          part.hidden.empty() ? nullptr : part.hidden.data(),
                            floor.data(),        part.active_heads.empty() ? nullptr : active};
    SearchResult found = part.searcher->search(queries, outside.data());
    if (n == 1) {
        steps[0]->take(std::move(found), nanoseconds(started));
        return;
    }
    const std::int64_t ns = nanoseconds(started) / n;
    for (std::int64_t i = 0; i < n; ++i) steps[i]->take(result_of(found, rows, n, i), ns);
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
            return calls[group[0]].plan->q_heads == calls[i].plan->q_heads &&
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
        search(group, *calls[alike[number][0]].plan);
    });
    return !alike.empty();
}

}  // namespace

std::vector<StepResult> run_steps(const std::vector<PlannedCall>& calls) {
    std::vector<StepRun> steps;
    steps.reserve(calls.size());
    for (const PlannedCall& planned : calls) steps.emplace_back(*planned.plan, planned.call);
    each(calls.size(), [&](std::size_t i) { steps[i].begin(); });
    while (search_next(steps, calls)) {
    }
    std::vector<StepResult> results(calls.size());
    each(calls.size(), [&](std::size_t i) { results[i] = steps[i].finish(); });
    return results;
}

StepResult run_step(const StepPlan& plan, const StepCall& call) {
    return std::move(run_steps({{&plan, call}})[0]);
}

}  // namespace kvdb
