#include "spanning_tree.h"

#include <algorithm>

#include "thread_pool.h"

namespace kvdb::indexes::graph {

namespace {

constexpr int kPasses = 8;  // over what is left, before it is tied to its neighbours in the text

}  // namespace

void SpanningTree::traverse() {
    std::fill_n(parents_, graph_.tokens, kNoToken);
    if (graph_.tokens == 0) return;
    parents_[0] = 0;
    traverse_from(0);
}

// Marks everything that can be reached from the token and was not reached before.
void SpanningTree::traverse_from(std::uint32_t token) {
    next_.assign(1, token);
    while (!next_.empty()) {
        const std::uint32_t from = next_.back();
        next_.pop_back();
        const std::uint32_t* links = links_of(from);
        for (int j = 0; j < graph_.degree && links[j] < graph_.tokens; ++j) {
            if (reached(links[j])) continue;
            parents_[links[j]] = from;
            next_.push_back(links[j]);
            __builtin_prefetch(links_of(links[j]));
        }
    }
}

std::int64_t SpanningTree::repair() {
    std::vector<std::uint32_t> left;
    for (std::int64_t token = 0; token < graph_.tokens; ++token) {
        if (parents_[token] == kNoToken) left.push_back(static_cast<std::uint32_t>(token));
    }
    const auto lost = static_cast<std::int64_t>(left.size());
    for (int pass = 0; pass < kPasses && !left.empty(); ++pass) {
        for (const std::uint32_t token : left) {
            if (!reached(token) && attach_to_neighbour(token)) traverse_from(token);
        }
        const std::size_t erased =
            std::erase_if(left, [&](std::uint32_t token) { return reached(token); });
        if (erased == 0) break;
    }
    for (const std::uint32_t token : left) {  // all before it have been reached by now
        if (reached(token)) continue;
        if (!attach_to_neighbour(token)) attach(token, nullptr, 0);
        traverse_from(token);
    }
    return lost;
}

// hnswlib lists the nearest last.
bool SpanningTree::attach_to_neighbour(std::uint32_t token) {
    const std::uint32_t* links = links_of(token);
    for (int j = count(links) - 1; j >= 0; --j) {
        if (links[j] != token && reached(links[j]) && link(links[j], token)) return true;
    }
    return false;
}

void SpanningTree::attach(std::uint32_t token, const std::uint32_t* near, int count) {
    for (int j = 0; j < count; ++j) {
        if (reached(near[j]) && link(near[j], token)) return;
    }
    for (std::uint32_t before = token; before-- > 0;) {
        if (reached(before) && link(before, token)) return;
    }
    // Any leaf of the tree can take the link.
    for (std::uint32_t after = token + 1; after < graph_.tokens; ++after) {
        if (reached(after) && link(after, token)) return;
    }
}

// The link goes into a free place, or replaces a link that is not part of the tree; without either,
// it is not added.
bool SpanningTree::link(std::uint32_t from, std::uint32_t to) {
    std::uint32_t* links = links_of(from);
    const int used = count(links);
    int at = used;
    if (used == graph_.degree) {
        at = 0;
        while (at < used && is_tree_edge(from, links[at])) ++at;
        if (at == used) return false;
    } else if (used + 1 < graph_.degree) {
        links[used + 1] = kNoToken;
    }
    links[at] = to;
    parents_[to] = from;
    return true;
}

std::int64_t repair(const Graph& graph, std::uint32_t* parents) {
    std::vector<std::int64_t> lost(graph.kv_heads);
    ThreadPool& pool = ThreadPool::instance();
    pool.run(graph.kv_heads, pool.threads(), [&](std::int64_t head, int) {
        SpanningTree tree(graph, static_cast<int>(head), parents + head * graph.capacity);
        tree.traverse();
        lost[head] = tree.repair();
    });
    std::int64_t all = 0;
    for (const std::int64_t count : lost) all += count;
    return all;
}

std::int64_t verify(const Graph& graph, int kv_head) {
    std::vector<std::uint32_t> parents(graph.tokens);
    SpanningTree tree(graph, kv_head, parents.data());
    tree.traverse();
    return std::count(parents.begin(), parents.end(), kNoToken);
}

}  // namespace kvdb::indexes::graph
