#include <nanobind/stl/optional.h>

#include "../bind_codes.h"
#include "flat.h"

namespace kvdb::indexes::flat {

using namespace nb::literals;

namespace {

using PyFlat = PyCodes<FlatCodes>;

FlatCodes read_codes(const PyArrays& arrays, int kv_heads, int head_dim) {
    const std::int64_t plane = std::int64_t{kChunk} * head_dim / 2;
    return {kv_heads,
            head_dim,
            arrays.get<float>("centres", head_dim + 1),
            arrays.get<std::uint16_t>("lengths", kLengths * kChunk),
            arrays.get<std::uint8_t>("high", plane),
            arrays.get<std::uint8_t>("low", plane),
            arrays.get<std::uint8_t>("signs", kChunk * FlatCodes::sign_bytes(head_dim)),
            arrays.get<std::int32_t>("longest", 1)};
}

nb::tuple py_search(const PyFlat& flat, const PyBlocks& blocks, const PyQueries& queries,
                    float beta, std::int64_t k, float scale, bool give_up) {
    flat.check(blocks);
    queries.check(blocks.blocks);
    if (!(beta >= 0) || k < 0) {
        fail("beta is " + std::to_string(beta) + " and k " + std::to_string(k) +
             "; expected numbers that are not negative");
    }
    FlatResult result;
    {
        const ReleaseGil release;
        result = search(blocks.blocks, flat.codes, queries.rows, {beta, k, give_up}, scale);
    }
    auto caps = to_numpy(std::move(result.caps));
    return nb::make_tuple(to_tuple(std::move(result)), std::move(caps));
}

nb::capsule py_searcher(const PyFlat& flat, const PyBlocks& blocks, float beta, std::int64_t k,
                        float scale) {
    flat.check(blocks);
    if (!(beta >= 0) || k < 0) fail("beta and k must not be negative");
    return to_searcher(blocks, 64, flat.codes.centres, {beta, double(k), scale},
                       [=](const QueryRows& queries, const float*) -> SearchResult {
                           return search(blocks.blocks, flat.codes, queries, {beta, k, true},
                                         scale);
                       });
}

void py_missed_mass(const PyFlat& flat, const PyBlocks& blocks, const PyQueries& queries,
                    const In<std::int64_t, 1>& offsets, const In<std::int32_t, 1>& ids,
                    const In<float, 1>& caps, float scale, const Out<float, 2>& missed,
                    const Out<float, 2>& bound) {
    flat.check(blocks);
    queries.check(blocks.blocks);
    const std::int64_t heads = queries.q_heads(), n = queries.rows.n;
    check_offsets(offsets, heads * n, static_cast<std::int64_t>(ids.shape(0)));
    check_shape(caps, {heads * n}, "caps");
    check_shape(missed, {heads, n}, "missed");
    check_shape(bound, {heads, n}, "bound");
    const ReleaseGil release;
    missed_mass(blocks.blocks, flat.codes, queries.rows, offsets.data(), ids.data(), caps.data(),
                scale, missed.data(), bound.data());
}

}  // namespace

void bind(nb::module_& m) {
    bind_codes<FlatCodes>(m, "Flat", &read_codes)
        .def("search", &py_search, "blocks"_a, "queries"_a, "beta"_a, "k"_a, "scale"_a, "give_up"_a)
        .def("searcher", &py_searcher, "blocks"_a, "beta"_a, "k"_a, "scale"_a)
        .def("missed_mass", &py_missed_mass, "blocks"_a, "queries"_a, "offsets"_a, "ids"_a,
             "caps"_a, "scale"_a, "missed"_a, "bound"_a);
}

}  // namespace kvdb::indexes::flat
