#include "../bind.h"

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cmath>

#include "graph.h"
#include "py_graph.h"

namespace kvdb::indexes::graph {

using namespace nb::literals;

namespace {

// What a search takes beside the graph and its queries; keeps the arrays alive.
struct PyWalk {
    Probes probes;
    GraphOptions options;
    Blocks blocks;
    In<std::int32_t, 2> tokens, outliers;
    In<std::uint8_t, 3> codes, outlier_codes;
    In<float, 2> outlier_residual;
    In<float, 1> radius;
};

PyWalk checked_walk(const PyGraph& graph, const PyBlocks& blocks, const In<std::int32_t, 2>& probes,
                    const In<std::uint8_t, 3>& probe_codes, std::int64_t random,
                    const In<std::int32_t, 2>& outliers, const In<std::uint8_t, 3>& outlier_codes,
                    const In<float, 2>& outlier_residual, const In<float, 1>& radius,
                    GraphOptions options) {
    graph.check(blocks);
    const std::int64_t heads = graph.graph.kv_heads;
    const auto count = static_cast<std::int64_t>(probes.shape(1));
    check_shape(probes, {heads, count}, "probes");
    check_shape(probe_codes, {heads, count, graph.graph.stride}, "probe_codes");
    const auto outlier_count = static_cast<std::int64_t>(outliers.shape(1));
    check_shape(outliers, {heads, outlier_count}, "outliers");
    check_shape(outlier_codes, {heads, outlier_count, graph.graph.stride}, "outlier_codes");
    check_shape(outlier_residual, {heads, outlier_count}, "outlier_residual");
    graph.check_tokens(probes.data(), probes.size(), "probes", 0);
    graph.check_tokens(outliers.data(), outliers.size(), "outliers", -1);
    check_shape(radius, {heads}, "radius");
    if (random < 0 || random > count) fail("random must be 0 to the number of probes");
    if (graph.graph.tokens > 0 && count == 0) fail("probes are empty");
    if (!(options.beta >= 0) || options.k < 0 || !std::isfinite(options.scale) ||
        !(options.slack >= 0)) {
        fail("beta, k and slack must not be negative, scale must be finite");
    }
    if (!(options.dense_share >= 0 && options.dense_share <= 1 && options.budget >= 0 &&
          options.budget <= 1)) {
        fail("dense_share and budget must be 0 to 1");
    }
    options.k = std::min(options.k, std::max<std::int64_t>(graph.graph.tokens, 1));
    PyWalk walk{{probes.data(), probe_codes.data(), count, random, outliers.data(),
                 outlier_codes.data(), outlier_residual.data(), outlier_count, radius.data()},
                options,
                blocks.blocks,
                probes,
                outliers,
                probe_codes,
                outlier_codes,
                outlier_residual,
                radius};
    walk.blocks.tokens = graph.graph.tokens;
    return walk;
}

nb::tuple py_search(const PyGraph& graph, const PyBlocks& blocks, const PyQueries& queries,
                    const In<std::int32_t, 2>& probes, const In<std::uint8_t, 3>& probe_codes,
                    std::int64_t random, const In<std::int32_t, 2>& outliers,
                    const In<std::uint8_t, 3>& outlier_codes, const In<float, 2>& outlier_residual,
                    const In<float, 1>& radius, float beta, std::int64_t k, float scale,
                    bool listed, bool share, bool give_up, int patience, std::int64_t least,
                    float slack, float dense_share, float budget) {
    const PyWalk walk = checked_walk(
        graph, blocks, probes, probe_codes, random, outliers, outlier_codes, outlier_residual,
        radius,
        {beta, k, scale, listed, share, give_up, patience, least, slack, dense_share, budget});
    queries.check(walk.blocks);
    SearchResult result;
    {
        const ReleaseGil release;
        result = search(graph.graph, walk.probes, walk.blocks, queries.rows, walk.options);
    }
    return to_tuple(std::move(result));
}

nb::capsule py_searcher(const PyGraph& graph, const PyBlocks& blocks,
                        const In<std::int32_t, 2>& probes, const In<std::uint8_t, 3>& probe_codes,
                        std::int64_t random, const In<std::int32_t, 2>& outliers,
                        const In<std::uint8_t, 3>& outlier_codes,
                        const In<float, 2>& outlier_residual, const In<float, 1>& radius,
                        float beta, std::int64_t k, float scale, int patience, std::int64_t least,
                        float slack, float dense_share, float budget) {
    const PyWalk walk = checked_walk(
        graph, blocks, probes, probe_codes, random, outliers, outlier_codes, outlier_residual,
        radius, {beta, k, scale, false, true, true, patience, least, slack, dense_share, budget});
    return to_searcher({walk.blocks, blocks.table}, 64, graph.graph.codes,
                       {double(graph.graph.tokens), double(random), beta, double(k), scale,
                        double(patience), double(least), slack, dense_share, budget},
                       [=](const QueryRows& queries, const float*) {
                           return search(graph.graph, walk.probes, walk.blocks, queries,
                                         walk.options);
                       });
}

void py_bound(const PyGraph& graph, const PyBlocks& blocks, const PyQueries& queries, float scale,
              const In<std::int64_t, 1>& offsets, const In<std::int32_t, 1>& ids,
              const Out<float, 2>& out) {
    graph.check(blocks);
    Blocks seen = blocks.blocks;
    seen.tokens = graph.graph.tokens;
    queries.check(seen);
    const std::int64_t heads = queries.q_heads(), n = queries.rows.n;
    check_offsets(offsets, heads * n, static_cast<std::int64_t>(ids.shape(0)));
    check_shape(out, {heads, n}, "bound");
    const ReleaseGil release;
    bound(graph.graph, queries.rows, scale, offsets.data(), ids.data(), out.data());
}

void py_encode(const PyGraph& graph, const PyBlocks& blocks, int kv_head, std::int64_t begin) {
    graph.check(blocks);
    graph.check_head(kv_head);
    if (begin < 0 || begin > graph.graph.tokens) fail("begin must be 0 to the number of tokens");
    const ReleaseGil release;
    encode(graph.graph, blocks.blocks, kv_head, begin, graph.graph.tokens);
}

void py_insert(const PyGraph& graph, const PyBlocks& blocks, std::int64_t begin, int width,
               const Out<std::uint32_t, 2>& parents) {
    graph.check(blocks);
    check_shape(parents, {graph.graph.kv_heads, graph.graph.capacity}, "parents");
    if (begin < 0 || begin > graph.graph.tokens || width < 1) {
        fail("begin must be 0 to the number of tokens, width at least 1");
    }
    const ReleaseGil release;
    insert(graph.graph, blocks.blocks, begin, width, parents.data());
}

void py_connect(const PyGraph& graph, const PyBlocks& blocks, int kv_head,
                const In<std::int32_t, 1>& pivots, const In<std::int64_t, 1>& offsets,
                const In<std::int32_t, 1>& candidates) {
    graph.check(blocks);
    graph.check_head(kv_head);
    const auto count = static_cast<std::int64_t>(pivots.shape(0));
    check_offsets(offsets, count, static_cast<std::int64_t>(candidates.shape(0)));
    graph.check_tokens(pivots.data(), pivots.size(), "pivots", 0);
    graph.check_tokens(candidates.data(), candidates.size(), "candidates", 0);
    const ReleaseGil release;
    connect(graph.graph, blocks.blocks, kv_head, pivots.data(), count, offsets.data(),
            candidates.data());
}

void py_choose_links(const PyGraph& graph, const PyBlocks& blocks, int kv_head, std::int64_t begin,
                     const In<std::int64_t, 1>& offsets, const In<std::int32_t, 1>& candidates,
                     const Out<std::uint32_t, 2>& chosen) {
    graph.check(blocks);
    graph.check_head(kv_head);
    const auto count = static_cast<std::int64_t>(chosen.shape(0));
    check_offsets(offsets, count, static_cast<std::int64_t>(candidates.shape(0)));
    graph.check_tokens(candidates.data(), candidates.size(), "candidates", -1);
    if (begin < 0 || count > graph.graph.tokens - begin || chosen.shape(1) > 1024) {
        fail("begin must be 0 to the number of tokens less those asked for, chosen at most 1024");
    }
    const ReleaseGil release;
    choose_links(graph.graph, blocks.blocks, kv_head, begin, count, offsets.data(),
                 candidates.data(), static_cast<int>(chosen.shape(1)), chosen.data());
}

std::int64_t py_repair(const PyGraph& graph, const Out<std::uint32_t, 2>& parents) {
    check_shape(parents, {graph.graph.kv_heads, graph.graph.capacity}, "parents");
    const ReleaseGil release;
    return repair(graph.graph, parents.data());
}

std::int64_t py_verify(const PyGraph& graph, int kv_head) {
    graph.check_head(kv_head);
    const ReleaseGil release;
    return verify(graph.graph, kv_head);
}

}  // namespace

void bind(nb::module_& m) {
    nb::class_<PyGraph>(m, "Graph")
        .def(
            "__init__",
            [](PyGraph* self, const OfTokens<std::uint8_t>& codes, const Out<float, 2>& residual,
               const OfTokens<std::uint32_t>& links, const In<float, 2>& low,
               const In<float, 2>& step, std::int64_t tokens) {
                new (self) PyGraph(make_graph(codes, residual, links, low, step, tokens));
            },
            "codes"_a, "residual"_a, "links"_a, "low"_a, "step"_a, "tokens"_a);
    m.def("graph_encode", &py_encode, "graph"_a, "blocks"_a, "kv_head"_a, "begin"_a);
    m.def("graph_insert", &py_insert, "graph"_a, "blocks"_a, "begin"_a, "width"_a, "parents"_a);
    m.def("graph_connect", &py_connect, "graph"_a, "blocks"_a, "kv_head"_a, "pivots"_a, "offsets"_a,
          "candidates"_a);
    m.def("graph_choose_links", &py_choose_links, "graph"_a, "blocks"_a, "kv_head"_a, "begin"_a,
          "offsets"_a, "candidates"_a, "chosen"_a);
    m.def("graph_repair", &py_repair, "graph"_a, "parents"_a);
    m.def("graph_search", &py_search, "graph"_a, "blocks"_a, "queries"_a, "probes"_a,
          "probe_codes"_a, "random"_a, "outliers"_a, "outlier_codes"_a, "outlier_residual"_a,
          "radius"_a, nb::kw_only(), "beta"_a, "k"_a, "scale"_a, "listed"_a, "share"_a, "give_up"_a,
          "patience"_a, "least"_a, "slack"_a, "dense_share"_a, "budget"_a);
    m.def("graph_searcher", &py_searcher, "graph"_a, "blocks"_a, "probes"_a, "probe_codes"_a,
          "random"_a, "outliers"_a, "outlier_codes"_a, "outlier_residual"_a, "radius"_a,
          nb::kw_only(), "beta"_a, "k"_a, "scale"_a, "patience"_a, "least"_a, "slack"_a,
          "dense_share"_a, "budget"_a);
    m.def("graph_bound", &py_bound, "graph"_a, "blocks"_a, "queries"_a, "scale"_a, "offsets"_a,
          "ids"_a, "bound"_a);
    m.def("graph_verify", &py_verify, "graph"_a, "kv_head"_a);
}

}  // namespace kvdb::indexes::graph
