#include "../attend/indexer.h"

#include <nanobind/stl/optional.h>

#include "bind.h"

using namespace nb::literals;

namespace kvdb {
namespace {

using QueriesArray = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using WeightsArray = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ScoredArray = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IdsArray = nb::ndarray<std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstIdsArray = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FoundArray = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Run run_of(const TableArray& table, const CountsArray& counts) {
    check_shape(counts, {static_cast<std::int64_t>(table.shape(0))}, "counts");
    return {table.data(), counts.data(), static_cast<std::int64_t>(table.shape(0))};
}

IndexerCall indexer_call(const Geometry& geometry, const QueriesArray& queries,
                         const WeightsArray& weights, const TableArray& table,
                         const CountsArray& counts) {
    const auto heads = static_cast<std::int64_t>(queries.shape(0));
    const auto n = static_cast<std::int64_t>(queries.shape(1));
    check_shape(queries, {heads, n, geometry.head_dim}, "queries");
    check_shape(weights, {heads, n}, "weights");
    if (heads == 0 || heads > kIndexerHeadsMax) {
        fail("queries are of " + std::to_string(heads) + " heads; expected 1 to " +
             std::to_string(kIndexerHeadsMax));
    }
    return {geometry, queries.data(),       weights.data(), static_cast<int>(heads),
            n,        run_of(table, counts)};
}

void py_indexer_scores(const Geometry& geometry, const QueriesArray& queries,
                       const WeightsArray& weights, const TableArray& table,
                       const CountsArray& counts, const ScoredArray& out) {
    const IndexerCall call = indexer_call(geometry, queries, weights, table, counts);
    std::int64_t tokens = 0;
    for (std::int64_t b = 0; b < call.run.blocks; ++b) tokens += call.run.counts[b];
    check_shape(out, {call.n, tokens}, "out");
    const ReleaseGil release;
    indexer_scores(call, out.data());
}

void py_indexer_select(const Geometry& geometry, const QueriesArray& queries,
                       const WeightsArray& weights, const TableArray& table,
                       const CountsArray& counts, const IdsArray& ids, const FoundArray& found) {
    const IndexerCall call = indexer_call(geometry, queries, weights, table, counts);
    const auto top = static_cast<std::int64_t>(ids.shape(1));
    check_shape(ids, {call.n, top}, "ids");
    check_shape(found, {call.n}, "found");
    const ReleaseGil release;
    indexer_select(call, top, ids.data(), found.data());
}

void py_attend_chosen(const Geometry& geometry, const ConstArray& q, const TableArray& table,
                      const CountsArray& counts, const ConstIdsArray& ids, const CountsArray& found,
                      float scale, const Array& out, const std::optional<ScoredArray>& lse,
                      const std::optional<ScoresArray>& sinks) {
    AttendChosenCall call{};
    AttendCall& all = call.all;
    all.geometry = geometry;
    all.n = tokens_of(q, "q");
    const auto q_heads = static_cast<std::int64_t>(q.shape(0));
    if (q_heads == 0 || q_heads % geometry.kv_heads != 0) {
        fail("q has " + std::to_string(q_heads) + " heads; expected a multiple of the " +
             std::to_string(geometry.kv_heads) + " KV heads");
    }
    all.q_heads = static_cast<int>(q_heads);
    all.kv_end = geometry.kv_heads;
    all.query = rows_of(q, q_heads, all.n, geometry.head_dim, geometry.dtype, "q");
    all.out_dtype = has_dtype(out, Dtype::float32) ? Dtype::float32 : geometry.dtype;
    all.out = rows_of(out, q_heads, all.n, geometry.value_dim, all.out_dtype, "out");
    all.run = run_of(table, counts);
    if (lse) check_shape(*lse, {q_heads, all.n}, "lse");
    all.lse = lse ? lse->data() : nullptr;
    all.sinks = checked_sinks(sinks, q_heads);
    all.scale = scale;
    call.ids_stride = static_cast<std::int64_t>(ids.shape(1));
    check_shape(ids, {all.n, call.ids_stride}, "ids");
    check_shape(found, {all.n}, "found");
    call.ids = ids.data();
    call.found = found.data();
    const ReleaseGil release;
    attend_chosen(call);
}

}  // namespace

void bind_indexer(nb::module_& m) {
    m.def("indexer_scores", &py_indexer_scores, "geometry"_a, "queries"_a, "weights"_a, "table"_a,
          "counts"_a, "out"_a);
    m.def("indexer_select", &py_indexer_select, "geometry"_a, "queries"_a, "weights"_a, "table"_a,
          "counts"_a, "ids"_a, "found"_a);
    m.def("attend_chosen", &py_attend_chosen, "geometry"_a, "q"_a, "table"_a, "counts"_a, "ids"_a,
          "found"_a, "scale"_a, "out"_a, "lse"_a = nb::none(), "sinks"_a = nb::none());
}

}  // namespace kvdb
