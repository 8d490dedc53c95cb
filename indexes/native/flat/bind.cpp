#include "../bind.h"

#include <nanobind/stl/optional.h>

#include <cmath>

#include "flat.h"

namespace kvdb::indexes::flat {

using namespace nb::literals;

namespace {

// The arrays of a flat index; keeps them alive.
struct PyFlat {
    FlatCodes codes;
    std::int64_t tokens;
    Out<float, 3> centres;
    Out<std::uint16_t, 4> lengths;
    Out<std::uint8_t, 3> high, low, signs;
    Out<std::int32_t, 2> longest;

    void check(const PyBlocks& blocks) const {
        const Geometry& geometry = blocks.blocks.geometry;
        if (geometry.kv_heads != codes.kv_heads || geometry.head_dim != codes.head_dim) {
            fail("the index is of " + std::to_string(codes.kv_heads) + " KV heads of " +
                 std::to_string(codes.head_dim) + "; the blocks hold " +
                 std::to_string(geometry.kv_heads) + " of " + std::to_string(geometry.head_dim));
        }
        if (blocks.blocks.tokens > tokens) {
            fail("the blocks hold " + std::to_string(blocks.blocks.tokens) +
                 " tokens; the index has room for " + std::to_string(tokens));
        }
    }
};

PyFlat make_flat(const Out<float, 3>& centres, const Out<std::uint16_t, 4>& lengths,
                 const Out<std::uint8_t, 3>& high, const Out<std::uint8_t, 3>& low,
                 const Out<std::uint8_t, 3>& signs, const Out<std::int32_t, 2>& longest) {
    const auto chunks = static_cast<std::int64_t>(centres.shape(0));
    const auto heads = static_cast<std::int64_t>(centres.shape(1));
    const auto dim = static_cast<std::int64_t>(centres.shape(2)) - 1;
    if (heads < 1 || dim < kHeadDimStep || dim > kHeadDimMax || dim % kHeadDimStep != 0) {
        fail("centres has shape [" + std::to_string(chunks) + ", " + std::to_string(heads) + ", " +
             std::to_string(dim + 1) + "]; expected [chunks, kv_heads, head_dim + 1]");
    }
    check_shape(lengths, {chunks, heads, kLengths, kChunk}, "lengths");
    check_shape(high, {chunks, heads, kChunk * dim / 2}, "high");
    check_shape(low, {chunks, heads, kChunk * dim / 2}, "low");
    check_shape(signs, {chunks, heads, kChunk * FlatCodes::sign_bytes(static_cast<int>(dim))},
                "signs");
    check_shape(longest, {chunks, heads}, "longest");
    return {{static_cast<int>(heads), static_cast<int>(dim), centres.data(), lengths.data(),
             high.data(), low.data(), signs.data(), longest.data()},
            chunks * kChunk,
            centres,
            lengths,
            high,
            low,
            signs,
            longest};
}

void py_insert(const PyFlat& flat, const PyBlocks& blocks, std::int64_t coded) {
    flat.check(blocks);
    if (coded < 0 || coded > blocks.blocks.tokens) {
        fail("coded is " + std::to_string(coded) + "; expected 0 to " +
             std::to_string(blocks.blocks.tokens));
    }
    const ReleaseGil release;
    insert(blocks.blocks, flat.codes, coded);
}

std::int64_t py_verify(const PyFlat& flat, const PyBlocks& blocks) {
    flat.check(blocks);
    const ReleaseGil release;
    return verify(blocks.blocks, flat.codes);
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
    return nb::make_tuple(to_numpy(std::move(result.rows.offsets)),
                          to_numpy(std::move(result.rows.ids)),
                          to_numpy(std::move(result.rows.scores)), to_numpy(std::move(result.caps)),
                          to_numpy(std::move(result.missed)), to_numpy(std::move(result.bound)),
                          to_numpy(std::move(result.passed)), to_numpy(std::move(result.dense)));
}

void py_missed_mass(const PyFlat& flat, const PyBlocks& blocks, const PyQueries& queries,
                    const In<std::int64_t, 1>& offsets, const In<std::int32_t, 1>& ids,
                    const In<float, 1>& caps, float scale, const Out<float, 1>& out,
                    const Out<float, 1>& bound) {
    flat.check(blocks);
    queries.check(blocks.blocks);
    const std::int64_t rows = queries.rows.rows() * blocks.blocks.geometry.kv_heads;
    check_shape(offsets, {rows + 1}, "offsets");
    check_shape(caps, {rows}, "caps");
    check_shape(out, {rows}, "missed");
    check_shape(bound, {rows}, "bound");
    const std::int64_t* at = offsets.data();
    for (std::int64_t r = 0; r < rows; ++r) {
        if (at[0] != 0 || at[r + 1] < at[r] ||
            at[r + 1] > static_cast<std::int64_t>(ids.shape(0))) {
            fail("offsets must rise from 0 to the number of ids");
        }
    }
    const ReleaseGil release;
    missed_mass(blocks.blocks, flat.codes, queries.rows, at, ids.data(), caps.data(), scale,
                out.data(), bound.data());
}

}  // namespace

void bind(nb::module_& m) {
    m.attr("FLAT_CHUNK") = kChunk;
    nb::class_<PyFlat>(m, "Flat")
        .def(
            "__init__",
            [](PyFlat* self, const Out<float, 3>& centres, const Out<std::uint16_t, 4>& lengths,
               const Out<std::uint8_t, 3>& high, const Out<std::uint8_t, 3>& low,
               const Out<std::uint8_t, 3>& signs, const Out<std::int32_t, 2>& longest) {
                new (self) PyFlat(make_flat(centres, lengths, high, low, signs, longest));
            },
            "centres"_a, "lengths"_a, "high"_a, "low"_a, "signs"_a, "longest"_a)
        .def("insert", &py_insert, "blocks"_a, "coded"_a)
        .def("verify", &py_verify, "blocks"_a)
        .def("search", &py_search, "blocks"_a, "queries"_a, "beta"_a, "k"_a, "scale"_a, "give_up"_a)
        .def("missed_mass", &py_missed_mass, "blocks"_a, "queries"_a, "offsets"_a, "ids"_a,
             "caps"_a, "scale"_a, "missed"_a, "bound"_a);
}

}  // namespace kvdb::indexes::flat
