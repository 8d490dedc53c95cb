#include "../bind.h"

#include <cmath>

#include "encode.h"
#include "search.h"

namespace kvdb::indexes::quantized {

using namespace nb::literals;

namespace {

// The arrays of a quantized index; keeps them alive.
struct PyCodes {
    Codes codes;
    std::int64_t tokens;
    Out<float, 3> centres, bounds;
    Out<std::uint16_t, 3> scales;
    Out<std::uint8_t, 3> keys, values;

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

PyCodes make_codes(const Out<float, 3>& centres, const Out<std::uint16_t, 3>& scales,
                   const Out<std::uint8_t, 3>& keys, const Out<std::uint8_t, 3>& values,
                   const Out<float, 3>& bounds) {
    const auto chunks = static_cast<std::int64_t>(centres.shape(0));
    const auto heads = static_cast<std::int64_t>(centres.shape(1));
    const auto dim = static_cast<std::int64_t>(centres.shape(2)) / 2;
    if (heads < 1 || dim < kHeadDimStep || dim > kHeadDimMax || dim % kHeadDimStep != 0) {
        fail("centres has shape " + shape_of(centres) +
             "; expected [chunks, kv_heads, 2 * head_dim]");
    }
    const Codes codes{
        static_cast<int>(heads), static_cast<int>(dim), centres.data(), scales.data(), keys.data(),
        values.data(),           bounds.data()};
    check_shape(centres, {chunks, heads, 2 * dim}, "centres");
    check_shape(scales, {chunks, heads, 2 * kChunk}, "scales");
    check_shape(keys, {chunks, heads, codes.key_bytes()}, "keys");
    check_shape(values, {chunks, heads, codes.value_bytes()}, "values");
    check_shape(bounds, {chunks, heads, 2 * kRuns}, "bounds");
    return {codes, chunks * kChunk, centres, bounds, scales, keys, values};
}

void py_encode(const PyCodes& codes, const PyBlocks& blocks, std::int64_t coded) {
    codes.check(blocks);
    if (coded < 0 || coded > blocks.blocks.tokens) {
        fail("coded is " + std::to_string(coded) + "; expected 0 to " +
             std::to_string(blocks.blocks.tokens));
    }
    const ReleaseGil release;
    encode(blocks.blocks, codes.codes, coded);
}

std::int64_t py_verify(const PyCodes& codes, const PyBlocks& blocks) {
    codes.check(blocks);
    const ReleaseGil release;
    return verify(blocks.blocks, codes.codes);
}

void check_options(int retrieval, double parameter, float scale, float margin) {
    const double most = retrieval == 2 ? 9e18 : retrieval == 3 ? 1 : INFINITY;
    if (retrieval < 0 || retrieval > 3 || !(parameter >= (retrieval == 2) && parameter <= most)) {
        fail("retrieval and parameter are no retrieval");
    }
    if (!(margin >= 0 && margin <= 1) || !(scale > 0 && std::isfinite(scale))) {
        fail("margin must be 0 to 1, scale positive");
    }
}

nb::tuple py_search(const PyCodes& codes, const PyBlocks& blocks, const PyQueries& queries,
                    int retrieval, double parameter, float scale, float margin,
                    const In<float, 2>& outside, bool tail, bool tight, bool give_up) {
    codes.check(blocks);
    queries.check(blocks.blocks);
    check_shape(outside, {std::int64_t(queries.q.shape(0)), queries.rows.n}, "outside");
    check_options(retrieval, parameter, scale, margin);
    Result result;
    {
        const ReleaseGil release;
        result = search(blocks.blocks, codes.codes, queries.rows,
                        {static_cast<Options::Retrieval>(retrieval), parameter, scale, margin,
                         outside.data(), tail, tight, give_up});
    }
    return nb::make_tuple(
        to_numpy(std::move(result.retrieved.offsets)), to_numpy(std::move(result.retrieved.ids)),
        to_numpy(std::move(result.retrieved.scores)), result.scanned, result.nbytes,
        to_numpy(std::move(result.missed)), to_numpy(std::move(result.bound)),
        to_numpy(std::move(result.tail)), to_numpy(std::move(result.dense)));
}

class QuantizedSearcher final : public Searcher {
  public:
    QuantizedSearcher(const PyCodes& codes, const PyBlocks& blocks, const Options& options)
        : Searcher(blocks.blocks.geometry, blocks.blocks.table, blocks.blocks.tokens),
          codes_(codes),
          blocks_(blocks),
          options_(options) {}

    SearchResult search(const QueryRows& queries, const float* outside) const override {
        Options options = options_;
        options.outside = outside;
        Result found = quantized::search(blocks_.blocks, codes_.codes, queries, options);
        return {std::move(found.retrieved), found.scanned,          found.nbytes,
                std::move(found.missed),    std::move(found.bound), std::move(found.tail),
                std::move(found.dense)};
    }

  private:
    const PyCodes codes_;
    const PyBlocks blocks_;
    const Options options_;
};

nb::capsule py_searcher(const PyCodes& codes, const PyBlocks& blocks, int retrieval,
                        double parameter, float scale, float margin, bool tail) {
    codes.check(blocks);
    check_options(retrieval, parameter, scale, margin);
    const Options options{static_cast<Options::Retrieval>(retrieval),
                          parameter,
                          scale,
                          margin,
                          nullptr,
                          tail,
                          false,
                          true};
    return to_capsule(std::make_unique<QuantizedSearcher>(codes, blocks, options));
}

}  // namespace

void bind(nb::module_& m) {
    m.attr("QUANTIZED_CHUNK") = kChunk;
    m.attr("QUANTIZED_RUNS") = kRuns;
    nb::class_<PyCodes>(m, "Quantized")
        .def(
            "__init__",
            [](PyCodes* self, const Out<float, 3>& centres, const Out<std::uint16_t, 3>& scales,
               const Out<std::uint8_t, 3>& keys, const Out<std::uint8_t, 3>& values,
               const Out<float, 3>& bounds) {
                new (self) PyCodes(make_codes(centres, scales, keys, values, bounds));
            },
            "centres"_a, "scales"_a, "keys"_a, "values"_a, "bounds"_a)
        .def("encode", &py_encode, "blocks"_a, "coded"_a)
        .def("verify", &py_verify, "blocks"_a)
        .def("search", &py_search, "blocks"_a, "queries"_a, "retrieval"_a, "parameter"_a, "scale"_a,
             "margin"_a, "outside"_a, "tail"_a, "tight"_a, "give_up"_a)
        .def("searcher", &py_searcher, "blocks"_a, "retrieval"_a, "parameter"_a, "scale"_a,
             "margin"_a, "tail"_a);
}

}  // namespace kvdb::indexes::quantized
