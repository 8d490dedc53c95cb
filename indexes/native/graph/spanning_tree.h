// The spanning tree that keeps every token of a head reachable: links from token 0.
#pragma once

#include <cstdint>
#include <vector>

#include "graph.h"

namespace kvdb::indexes::graph {

inline constexpr std::uint32_t kNoToken = 0xffffffffu;

// When HNSW prunes links back, some tokens lose all links to them. Here each token has a parent,
// whose list holds a link to it, and parents lead to token 0: if no link of this tree is dropped,
// every token stays reachable.
class SpanningTree {
  public:
    // parents [tokens]: kNoToken where a token is not reached.
    SpanningTree(const Graph& graph, int kv_head, std::uint32_t* parents)
        : graph_(graph), links_(graph.links_of(kv_head)), parents_(parents) {}

    // Finds the parents anew, from token 0.
    void traverse();

    // Adds a link to each token that was not reached: from a reached token among its own links if
    // there is one, otherwise from a token before it in the text. Returns how many tokens were not
    // reached before.
    std::int64_t repair();

    // A link to a token that has no parent, from the first of `near` that can take it, or from any
    // other that was reached.
    void attach(std::uint32_t token, const std::uint32_t* near, int count);

    bool reached(std::uint32_t token) const { return parents_[token] != kNoToken; }
    bool is_tree_edge(std::uint32_t from, std::uint32_t to) const {
        return parents_[to] == from && to != 0;
    }
    void set_parent(std::uint32_t token, std::uint32_t from) { parents_[token] = from; }

  private:
    void traverse_from(std::uint32_t token);
    bool attach_to_neighbour(std::uint32_t token);
    bool link(std::uint32_t from, std::uint32_t to);
    std::uint32_t* links_of(std::uint32_t token) const {
        return links_ + std::int64_t{token} * graph_.link_step;
    }
    int count(const std::uint32_t* links) const {
        int used = 0;
        while (used < graph_.degree && links[used] < graph_.tokens) ++used;
        return used;
    }

    const Graph& graph_;
    std::uint32_t* const links_;
    std::uint32_t* const parents_;
    std::vector<std::uint32_t> next_;
};

}  // namespace kvdb::indexes::graph
