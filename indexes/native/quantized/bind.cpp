#include "../bind_codes.h"
#include "insert.h"
#include "search.h"

namespace kvdb::indexes::quantized {

using namespace nb::literals;

namespace {

Codes read_codes(const PyArrays& arrays, int kv_heads, int head_dim) {
    const std::int64_t keys = std::int64_t{kChunk} * head_dim / 2;
    const std::int64_t values = std::int64_t{kChunk} * Codes::value_dims(head_dim) / 2;
    return {kv_heads,
            head_dim,
            arrays.get<float>("centres", 2 * head_dim),
            arrays.get<std::uint16_t>("scales", 2 * kChunk),
            arrays.get<std::uint8_t>("keys", keys),
            arrays.get<std::uint8_t>("values", values),
            arrays.get<float>("bounds", 2 * kRuns)};
}

nb::tuple py_search(const PyCodes<Codes>& codes, const PyBlocks& blocks, const PyQueries& queries,
                    int retrieval, double parameter, float scale, float margin,
                    const In<float, 2>& outside, bool tail, bool tight, bool give_up) {
    codes.check(blocks);
    queries.check(blocks.blocks);
    const SearchOptions options = checked_options(queries, retrieval, parameter, scale, margin,
                                                  outside, tail, tight, give_up);
    SearchResult result;
    {
        const ReleaseGil release;
        result = search(blocks.blocks, codes.codes, queries.rows, options);
    }
    return to_tuple(std::move(result));
}

nb::capsule py_searcher(const PyCodes<Codes>& codes, const PyBlocks& blocks, int retrieval,
                        double parameter, float scale, float margin, bool tail) {
    codes.check(blocks);
    const SearchOptions options =
        checked_options(retrieval, parameter, scale, margin, tail, false, true);
    return to_searcher(blocks, 64, codes.codes.keys,
                       {double(retrieval), parameter, scale, margin, double(tail)},
                       [=](const QueryRows& queries, const float* outside) {
                           SearchOptions all = options;
                           all.outside = outside;
                           return search(blocks.blocks, codes.codes, queries, all);
                       });
}

}  // namespace

void bind(nb::module_& m) {
    m.attr("QUANTIZED_RUNS") = kRuns;
    bind_codes<Codes>(m, "Quantized", &read_codes)
        .def("search", &py_search, "blocks"_a, "queries"_a, "retrieval"_a, "parameter"_a, "scale"_a,
             "margin"_a, "outside"_a, "tail"_a, "tight"_a, "give_up"_a)
        .def("searcher", &py_searcher, "blocks"_a, "retrieval"_a, "parameter"_a, "scale"_a,
             "margin"_a, "tail"_a);
}

}  // namespace kvdb::indexes::quantized
