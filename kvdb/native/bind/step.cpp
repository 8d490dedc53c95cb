#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

using namespace nb::literals;

namespace kvdb {
namespace {

StepCut cut_of(const PyCut& cut) {
    const auto [kind, parameter] = cut;
    const bool top_k = kind == StepCut::Kind::top_k;
    if (!(parameter >= (top_k ? 1 : 0)) || (top_k && !(parameter <= INT32_MAX))) {
        fail("a cut has the parameter " + std::to_string(parameter) + "; expected " +
             (top_k ? "a number of tokens" : "a range of scores, 0 or more"));
    }
    return {kind, parameter};
}

}  // namespace

StepBlocks PyStep::blocks_of(const PyReads& reads) {
    const auto& [table, counts, placement] = reads;
    if (table.shape(0) != counts.shape(0)) {
        fail("counts has " + std::to_string(counts.shape(0)) +
             " elements; expected one for each of " + std::to_string(table.shape(0)) + " blocks");
    }
    StepBlocks blocks{{table.data(), table.data() + table.size()},
                      {counts.data(), counts.data() + counts.size()},
                      {}};
    if (placement) {
        placements.push_back(std::make_unique<OwnedPlacement>(*placement));
        blocks.placement =
            placements.back()->of(plan.geometry, static_cast<std::int64_t>(blocks.table.size()));
    }
    return blocks;
}

std::vector<std::uint8_t> PyStep::heads_of(const HeadsArray& heads, const char* name) const {
    check_shape(heads, {plan.geometry.kv_heads}, name);
    std::vector<std::uint8_t> flags(heads.size());
    std::memcpy(flags.data(), heads.data(),
                flags.size());  // its bytes may be other than 0 and 1
    for (std::uint8_t& flag : flags) flag = flag != 0;
    return flags;
}

StepTurn PyStep::turn_of(const PyTurn& turn) const {
    const auto& [cos, sin, interleaved] = turn;
    const auto pairs = static_cast<std::int64_t>(cos.size());
    if (2 * pairs > plan.geometry.head_dim) {
        fail("cos has " + std::to_string(pairs) + " elements; expected at most half of head_dim");
    }
    check_shape(sin, {pairs}, "sin");
    return {{cos.data(), cos.data() + pairs}, {sin.data(), sin.data() + pairs}, interleaved};
}

void PyStep::add(const PySearch& search) {
    const auto& [searcher, begin, end, reads, active_heads, hidden, observed, turn, cut] = search;
    const auto* to = static_cast<const indexes::Searcher*>(
        PyCapsule_IsValid(searcher.ptr(), indexes::kSearcherName)
            ? PyCapsule_GetPointer(searcher.ptr(), indexes::kSearcherName)
            : nullptr);
    if (!to) fail("a search has no searcher of an index");
    const Geometry &mine = plan.geometry, &its = to->geometry;
    if (its.dtype != mine.dtype || its.kv_heads != mine.kv_heads || its.head_dim != mine.head_dim ||
        its.block_size != mine.block_size || its.value_dim != mine.value_dim ||
        its.values_in_keys != mine.values_in_keys) {
        fail("a searcher is of blocks of another geometry");
    }
    if (begin < 0 || end < begin || end > to->tokens) {
        fail("tokens [" + std::to_string(begin) + ", " + std::to_string(end) +
             ") are searched; expected a range within the index's " + std::to_string(to->tokens));
    }
    if (hidden && static_cast<std::int64_t>(hidden->size()) < (to->tokens + 63) / 64) {
        fail("hidden has " + std::to_string(hidden->size()) +
             " words; expected a bit for each token");
    }
    StepSearch made{to, begin, end, blocks_of(reads), {}, {}, observed, {}, {}};
    if (turn) made.turn = turn_of(*turn);
    if (cut) made.cut = cut_of(*cut);
    if (active_heads) made.active_heads = heads_of(*active_heads, "active_heads");
    if (hidden) made.hidden.assign(hidden->data(), hidden->data() + hidden->size());
    plan.searches.push_back(std::move(made));
    searchers.push_back(searcher);
}

namespace {

using GuardsArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RangesArray = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using TopArray = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using LogsArray = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using PyWhole = std::tuple<PyReads, std::int64_t, HeadsArray>;

PyStep make_step(const Geometry& geometry, int q_heads, float scale, const PyReads& window,
                 std::int64_t grows_from, const std::optional<PyReads>& sinks,
                 const std::vector<PySearch>& searches, const std::vector<PyWhole>& whole,
                 std::int64_t tokens, const std::optional<GuardsArray>& guards,
                 const std::optional<RangesArray>& ranges, double found_share_max,
                 double whole_share_max, double bound_max) {
    if (q_heads < 1 || q_heads % geometry.kv_heads != 0) {
        fail("q_heads is " + std::to_string(q_heads) + "; expected a multiple of the " +
             std::to_string(geometry.kv_heads) + " KV heads");
    }
    check_attendable(geometry);
    if (grows_from < -1) fail("grows_from is below -1");
    PyStep step;
    StepPlan& plan = step.plan;
    plan.geometry = geometry;
    plan.q_heads = q_heads;
    plan.scale = scale;
    plan.window = step.blocks_of(window);
    plan.grows_from = grows_from;
    if (sinks) plan.sinks = step.blocks_of(*sinks);
    for (const PySearch& search : searches) step.add(search);
    for (const auto& [reads, count, heads] : whole) {
        plan.whole.push_back({step.blocks_of(reads), count, step.heads_of(heads, "heads")});
    }
    plan.tokens = tokens;
    if (guards) {
        check_shape(*guards, {geometry.kv_heads}, "guards");
        plan.guards.assign(guards->data(), guards->data() + guards->size());
    }
    if (ranges) {
        check_shape(*ranges, {2, kSigns, q_heads}, "ranges");
        plan.ranges.assign(ranges->data(), ranges->data() + ranges->size());
    }
    plan.found_share_max = found_share_max;
    plan.whole_share_max = whole_share_max;
    plan.bound_max = bound_max;
    return step;
}

std::vector<StepResult> py_run(const PyStep& step, const ConstArray& q,
                               const std::vector<std::int64_t>& queries, bool causal,
                               const TableArray& table, const CountsArray& counts, const Array& out,
                               const LogsArray& logs, bool observed, bool judged,
                               const std::optional<ScoresArray>& sinks) {
    const StepPlan& plan = step.plan;
    const Geometry& geometry = plan.geometry;
    const std::int64_t n = tokens_of(q, "q"), heads = plan.q_heads;
    const auto asked = static_cast<std::int64_t>(queries.size());
    const Rows from = rows_of(q, heads, n, geometry.head_dim, geometry.dtype, "q");
    const Rows to = rows_of(out, asked * heads, 1, geometry.value_dim, geometry.dtype, "out");
    if (asked > 0 && to.head_stride != geometry.value_dim) fail("out is not contiguous");
    check_shape(logs, {asked, 3, heads}, "logs");
    const auto blocks = static_cast<std::int64_t>(table.shape(0));
    if (counts.shape(0) != table.shape(0) || plan.grows_from > blocks) {
        fail("the run has " + std::to_string(blocks) + " blocks and " +
             std::to_string(counts.shape(0)) + " counts; expected as many, and at least " +
             std::to_string(plan.grows_from));
    }
    const auto width = static_cast<std::int64_t>(geometry.element_bytes());
    const float* given_sinks = checked_sinks(sinks, heads);
    std::vector<PlannedCall> calls;
    for (std::int64_t i = 0; i < asked; ++i) {
        const std::int64_t query = queries[i];
        if (query < 0 || query >= n) fail("there is no query " + std::to_string(query));
        float* own = logs.data() + i * 3 * heads;
        StepCall call{};
        call.query = {static_cast<char*>(from.data) + query * from.token_stride * width,
                      from.head_stride, from.token_stride};
        call.table = table.data();
        call.counts = counts.data();
        call.blocks = blocks;
        call.unseen = causal ? n - 1 - query : 0;
        call.sinks = given_sinks;
        call.out = static_cast<char*>(to.data) + i * heads * geometry.value_row_bytes();
        call.lse = own;
        call.read_lse = own + heads;
        call.missed = own + 2 * heads;
        call.observed = observed;
        call.unlike = judged ? Unlike::read_whole : Unlike::answered;
        calls.push_back({&plan, call});
    }
    const ReleaseGil release;
    return run_steps(calls);
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> numpy_of(const std::vector<T>& values) {
    auto* copy = new std::vector<T>(values);
    nb::capsule owner(copy, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(copy->data(), {copy->size()}, owner);
}

nb::tuple py_found(const StepResult& result, std::size_t i) {
    if (i >= result.found.size()) fail("there is no search of this number");
    const indexes::SearchResult& found = result.found[i];
    return nb::make_tuple(numpy_of(found.retrieved.offsets), numpy_of(found.retrieved.ids),
                          numpy_of(found.retrieved.scores), found.scanned, found.nbytes,
                          numpy_of(found.missed), numpy_of(found.bound), numpy_of(found.tail),
                          numpy_of(found.dense), result.found_ns[i]);
}

nb::list py_observations_of(const PyStep& step, const StepResult& result,
                            const std::optional<TopArray>& top, const TopArray& lse) {
    const StepPlan& plan = step.plan;
    if (result.found.size() > plan.searches.size()) fail("the result is of another step");
    for (const indexes::SearchResult& found : result.found) {
        if (found.missed.size() != static_cast<std::size_t>(plan.q_heads)) {
            fail("the result is of another step");
        }
    }
    const bool ended = result.end == StepEnd::answered || result.end == StepEnd::bound_exceeded;
    if (!top && !ended) fail("the largest scores are not known");
    if (top) check_shape(*top, {plan.q_heads, 1}, "top");
    check_shape(lse, {plan.q_heads, 1}, "lse");
    return py_observations(observations(plan, result, top ? top->data() : nullptr, lse.data()));
}

}  // namespace

nb::list py_observations(const std::vector<StepObservation>& observations) {
    nb::list all;
    for (const StepObservation& one : observations) {
        all.append(nb::make_tuple(one.search,
                                  nb::bytes(one.values.data(), one.values.size() * sizeof(float)),
                                  nb::bytes(one.seen.data(), one.seen.size())));
    }
    return all;
}

void bind_step(nb::module_& m) {
    nb::enum_<StepCut::Kind>(m, "StepCut")
        .value("range", StepCut::Kind::range)
        .value("top_k", StepCut::Kind::top_k);
    nb::enum_<StepEnd>(m, "StepEnd")
        .value("answered", StepEnd::answered)
        .value("reads_everything", StepEnd::reads_everything)
        .value("not_finite", StepEnd::not_finite)
        .value("bound_exceeded", StepEnd::bound_exceeded)
        .value("unlike", StepEnd::unlike);
    nb::class_<StepResult>(m, "StepResult")
        .def_ro("end", &StepResult::end)
        .def_prop_ro("searches", [](const StepResult& self) { return self.found.size(); })
        .def_ro("scanned", &StepResult::scanned)
        .def_ro("retrieved", &StepResult::retrieved)
        .def_ro("nbytes", &StepResult::nbytes)
        .def_prop_ro("missed", [](const StepResult& self) { return self.missed.mean; })
        .def_prop_ro("bound", [](const StepResult& self) { return self.bound.mean; })
        .def_prop_ro("bound_max", [](const StepResult& self) { return self.bound.largest; })
        .def_ro("search_ns", &StepResult::search_ns)
        .def_ro("gather_ns", &StepResult::gather_ns)
        .def("signs", [](const StepResult& self) { return numpy_of(self.signs); })
        .def("unlike", [](const StepResult& self) { return numpy_of(self.unlike); })
        .def("given_up", [](const StepResult& self) { return numpy_of(self.given_up()); })
        .def("found", &py_found, "search"_a);
    nb::class_<PyStep>(m, "Step")
        .def(
            "__init__",
            [](PyStep* self, const Geometry& geometry, int q_heads, float scale,
               const PyReads& window, std::int64_t grows_from, const std::optional<PyReads>& sinks,
               const std::vector<PySearch>& searches, const std::vector<PyWhole>& whole,
               std::int64_t tokens, const std::optional<GuardsArray>& guards,
               const std::optional<RangesArray>& ranges, double found_share_max,
               double whole_share_max, double bound_max) {
                new (self) PyStep(make_step(geometry, q_heads, scale, window, grows_from, sinks,
                                            searches, whole, tokens, guards, ranges,
                                            found_share_max, whole_share_max, bound_max));
            },
            "geometry"_a, "q_heads"_a, "scale"_a, "window"_a, "grows_from"_a, "sinks"_a.none(),
            "searches"_a, "whole"_a, "tokens"_a, "guards"_a.none(), "ranges"_a.none(),
            "found_share_max"_a, "whole_share_max"_a, "bound_max"_a)
        .def("run", &py_run, "q"_a, "queries"_a, "causal"_a, "table"_a, "counts"_a, "out"_a,
             "logs"_a, "observed"_a, "judged"_a, "sinks"_a = nb::none())
        .def("observations", &py_observations_of, "result"_a, "top"_a.none(), "lse"_a);
}

}  // namespace kvdb
