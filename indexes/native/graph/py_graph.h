// A graph as Python holds it, over arrays that are checked.
#pragma once

#include <cmath>
#include <string>

#include "../bind.h"
#include "graph.h"

namespace kvdb::indexes::graph {

// What is kept of each token of each KV head, at equal distances.
template <class T>
using OfTokens = nb::ndarray<T, nb::ndim<3>, nb::device::cpu>;

template <class T>
void check_distances(const OfTokens<T>& array, const char* name) {
    const auto width = static_cast<std::int64_t>(array.shape(2));
    const auto tokens = static_cast<std::int64_t>(array.shape(1));
    const bool apart =
        tokens == 0 || array.shape(0) == 1 || array.stride(0) == tokens * array.stride(1);
    if (!apart || (tokens > 0 && (array.stride(2) != 1 || array.stride(1) < width))) {
        fail(std::string(name) + " must hold the tokens of all KV heads at equal distances");
    }
}

// `Graph` and `Probes` as Python holds them; keeps their arrays alive.
struct PyGraph {
    Graph graph;
    OfTokens<std::uint8_t> codes;
    Out<float, 2> residual;
    OfTokens<std::uint32_t> links;
    In<float, 2> low, step;

    void check(const PyBlocks& blocks) const {
        const Geometry& geometry = blocks.blocks.geometry;
        if (geometry.kv_heads != graph.kv_heads || geometry.head_dim != graph.head_dim ||
            blocks.blocks.tokens < graph.tokens) {
            fail("the blocks are not those of the graph: it has " + std::to_string(graph.kv_heads) +
                 " KV heads of " + std::to_string(graph.head_dim) + " dimensions and " +
                 std::to_string(graph.tokens) + " tokens");
        }
    }
    void check_head(int kv_head) const {
        if (kv_head < 0 || kv_head >= graph.kv_heads) {
            fail("kv_head is " + std::to_string(kv_head) + "; expected 0 to " +
                 std::to_string(graph.kv_heads - 1));
        }
    }
    void check_tokens(const std::int32_t* tokens, std::size_t count, const char* name,
                      std::int32_t least) const {
        for (std::size_t i = 0; i < count; ++i) {
            if (tokens[i] < least || tokens[i] >= graph.tokens) {
                fail(std::string(name) + " holds " + std::to_string(tokens[i]) +
                     "; expected tokens below " + std::to_string(graph.tokens));
            }
        }
    }
};

inline PyGraph make_graph(const OfTokens<std::uint8_t>& codes, const Out<float, 2>& residual,
                          const OfTokens<std::uint32_t>& links, const In<float, 2>& low,
                          const In<float, 2>& step, std::int64_t tokens) {
    const auto heads = static_cast<std::int64_t>(codes.shape(0));
    const auto capacity = static_cast<std::int64_t>(codes.shape(1));
    const auto stride = static_cast<std::int64_t>(codes.shape(2));
    const auto head_dim = static_cast<std::int64_t>(low.shape(1));
    const auto degree = static_cast<std::int64_t>(links.shape(2));
    check_shape(residual, {heads, capacity}, "residual");
    if (links.shape(0) != codes.shape(0) || links.shape(1) != codes.shape(1)) {
        fail("codes and links are of other shapes; expected the same KV heads and tokens");
    }
    check_distances(codes, "codes");
    check_distances(links, "links");
    check_shape(low, {heads, head_dim}, "low");
    check_shape(step, {heads, head_dim}, "step");
    if (heads < 1 || head_dim < 1 || head_dim > kHeadDimMax || stride % kCodeStep != 0 ||
        stride < head_dim || stride >= head_dim + kCodeStep) {
        fail("codes have " + std::to_string(stride) + " bytes a token; expected " +
             std::to_string(head_dim) + " rounded up to a multiple of " +
             std::to_string(kCodeStep));
    }
    if (tokens < 0 || tokens > capacity || tokens > INT32_MAX || degree < 2 || degree > 1024) {
        fail("tokens is " + std::to_string(tokens) + " and degree " + std::to_string(degree) +
             "; expected at most " + std::to_string(capacity) + ", and 2 to 1024");
    }
    for (std::size_t i = 0; i < step.size(); ++i) {
        if (!(step.data()[i] > 0 && step.data()[i] < INFINITY && std::isfinite(low.data()[i]))) {
            fail("low and step must be finite, and step above 0");
        }
    }
    return {{static_cast<int>(heads), static_cast<int>(head_dim), static_cast<int>(degree), tokens,
             capacity, stride, codes.stride(1), links.stride(1), codes.data(), residual.data(),
             links.data(), low.data(), step.data()},
            codes,
            residual,
            links,
            low,
            step};
}

}  // namespace kvdb::indexes::graph
