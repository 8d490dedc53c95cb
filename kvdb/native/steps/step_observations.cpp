#include "step_observations.h"

#include <memory>

#include "observe.h"

namespace kvdb {
namespace {

constexpr std::int64_t kMeasures = 4;

}  // namespace

std::vector<StepObservation> observations(const StepPlan& plan, const StepResult& result,
                                          const float* top, const float* lse) {
    const std::int64_t rows = plan.q_heads, values = kMeasures * rows;
    std::vector<StepObservation> all;
    for (std::size_t i = 0; i < result.shown.dense.size(); ++i) {
        const StepSearch& search = plan.searches[i];
        if (!search.observed) continue;
        const indexes::RetrievedRows& found = result.found[i].retrieved;
        StepObservation one{i, std::vector<float>(values), {}};
        const auto seen = std::make_unique<bool[]>(values);
        const bool complete = observe({
            .retrieved = {rows, found.offsets.data(), found.scores.data(),
                          result.shown.dense[i].data()},
            .active_heads = search.active_heads.empty() ? nullptr : search.active_heads.data(),
            .kv_heads = plan.geometry.kv_heads,
            .tokens = static_cast<double>(search.end - search.begin),
            .window = result.shown.window_top.data(),
            .top = top ? top : result.shown.top.data(),
            .lse = lse,
            .scale = plan.scale,
            .values = one.values.data(),
            .seen = seen.get(),
        });
        if (!complete) one.seen.assign(seen.get(), seen.get() + values);
        all.push_back(std::move(one));
    }
    return all;
}

}  // namespace kvdb
