// Links of new tokens, and links that sample queries ask for.
#include <algorithm>
#include <limits>

#include "../score/kernels.h"
#include "graph.h"
#include "spanning_tree.h"
#include "thread_pool.h"
#include "visited.h"

namespace kvdb::indexes::graph {

namespace {

constexpr int kEntries = 64;  // tokens, spread evenly, that the search for neighbours begins with

struct Near {
    float distance;
    std::uint32_t token;
    bool operator<(const Near& other) const { return distance < other.distance; }
};

// Changes the graph of one KV head.
class Linker {
  public:
    Linker(const Graph& graph, const Blocks& blocks, int kv_head)
        : graph_(graph), blocks_(blocks), kv_head_(kv_head), key_(graph.head_dim) {}

    // HNSW's insertion (Malkov and Yashunin, arXiv 1603.09320, algorithms 1, 2 and 4) into the
    // level that holds all tokens; `width` candidates are kept. No link of the tree is dropped.
    void insert(std::uint32_t token, int width, SpanningTree& tree) {
        std::uint32_t* links = links_of(token);
        std::fill_n(links, graph_.degree, kNoToken);
        tree.set_parent(token, token == 0 ? 0 : kNoToken);
        if (token == 0) return;
        const std::vector<Near> candidates = nearest(token, width);
        std::vector<std::uint32_t> chosen;
        choose(candidates, graph_.degree / 2, chosen);
        std::copy(chosen.begin(), chosen.end(), links);
        for (const std::uint32_t other : chosen) link_back(other, token, tree);
        if (!tree.reached(token))
            tree.attach(token, chosen.data(), static_cast<int>(chosen.size()));
    }

    // Links a token to those candidates that are closer to it than to its other links, then to the
    // nearest of the others as far as there is room, and links these back. The heuristic alone
    // would drop the latter, but the result of a query is a whole range and not one nearest key,
    // and a search within the range needs them.
    void connect(std::uint32_t pivot, std::vector<std::uint32_t> candidates) {
        std::uint32_t* links = links_of(pivot);
        std::vector<std::uint32_t> chosen(links, links + count(links));
        std::erase_if(candidates, [&](std::uint32_t token) {
            return token == pivot || std::find(chosen.begin(), chosen.end(), token) != chosen.end();
        });
        const std::vector<Near> near = by_distance(pivot, candidates);
        choose(near, graph_.degree, chosen);
        for (const Near& left : near) {
            if (static_cast<int>(chosen.size()) >= graph_.degree) break;
            if (std::find(chosen.begin(), chosen.end(), left.token) == chosen.end()) {
                chosen.push_back(left.token);
            }
        }
        const int before = count(links);
        std::copy(chosen.begin() + before, chosen.end(), links + before);
        for (std::size_t i = before; i < chosen.size(); ++i) {
            std::uint32_t* back = links_of(chosen[i]);
            const int used = count(back);
            if (used < graph_.degree && std::find(back, back + used, pivot) == back + used) {
                back[used] = pivot;
            }
        }
    }

    // HNSW's rule alone, as hnswlib has it: lists with room for all stay whole.
    void choose_of(std::uint32_t token, std::vector<std::uint32_t> candidates, int most,
                   std::uint32_t* out) {
        std::sort(candidates.begin(), candidates.end());
        candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
        std::erase_if(candidates, [&](std::uint32_t other) {
            return other == token || other >= graph_.tokens;
        });
        const std::vector<Near> near = by_distance(token, candidates);
        std::vector<std::uint32_t> chosen;
        if (static_cast<int>(near.size()) > most) {
            choose(near, most, chosen);
        } else {
            for (const Near& each : near) chosen.push_back(each.token);
        }
        std::fill(std::reverse_copy(chosen.begin(), chosen.end(), out), out + most, kNoToken);
    }

  private:
    std::uint32_t* links_of(std::uint32_t token) const {
        return graph_.links_of(kv_head_) + std::int64_t{token} * graph_.link_step;
    }

    int count(const std::uint32_t* links) const {
        int used = 0;
        while (used < graph_.degree && links[used] < graph_.tokens) ++used;
        return used;
    }

    void measure(std::uint32_t token, const std::vector<std::uint32_t>& others) {
        const auto dtype = static_cast<int>(blocks_.geometry.dtype);
        score_kernels().widen_keys[dtype]({blocks_, kv_head_, token, 1, key_.data()});
        measure_from_key(others);
    }

    void measure_from_key(const std::vector<std::uint32_t>& others) {
        distances_.resize(others.size());
        graph_kernels().distance[static_cast<int>(blocks_.geometry.dtype)](
            {blocks_, kv_head_, key_.data(), others.data(),
             static_cast<std::int64_t>(others.size()), distances_.data()});
    }

    std::vector<Near> by_distance(std::uint32_t token, const std::vector<std::uint32_t>& others) {
        measure(token, others);
        std::vector<Near> near;
        for (std::size_t i = 0; i < others.size(); ++i) near.push_back({distances_[i], others[i]});
        std::sort(near.begin(), near.end());
        return near;
    }

    // The nearest of the tokens before this one, found by a best-first search from evenly spread
    // tokens and from the token before.
    std::vector<Near> nearest(std::uint32_t token, int width) {
        const auto farther = [](const Near& a, const Near& b) { return b < a; };
        std::vector<Near> open, kept;  // heaps: the nearest on top, the farthest on top
        std::vector<std::uint32_t> fresh;
        visited_.clear();
        for (std::int64_t i = 0; i < kEntries; ++i) {
            const auto entry = static_cast<std::uint32_t>(i * token / kEntries);
            if (visited_.insert(entry)) fresh.push_back(entry);
        }
        if (visited_.insert(token - 1)) fresh.push_back(token - 1);
        measure(token, fresh);
        for (;;) {
            for (std::size_t i = 0; i < fresh.size(); ++i) {
                const Near near{distances_[i], fresh[i]};
                if (static_cast<int>(kept.size()) >= width && !(near < kept.front())) continue;
                open.push_back(near);
                std::push_heap(open.begin(), open.end(), farther);
                kept.push_back(near);
                std::push_heap(kept.begin(), kept.end());
                if (static_cast<int>(kept.size()) > width) {
                    std::pop_heap(kept.begin(), kept.end());
                    kept.pop_back();
                }
            }
            if (open.empty() ||
                (static_cast<int>(kept.size()) >= width && kept.front() < open.front()))
                break;
            const std::uint32_t* links = links_of(open.front().token);
            std::pop_heap(open.begin(), open.end(), farther);
            open.pop_back();
            fresh.clear();
            for (int j = 0; j < graph_.degree && links[j] < graph_.tokens; ++j) {
                if (links[j] < token && visited_.insert(links[j])) fresh.push_back(links[j]);
            }
            measure_from_key(fresh);
        }
        std::sort_heap(kept.begin(), kept.end());
        return kept;
    }

    // Takes candidates, nearest first, that lie closer to the token than to what was chosen.
    void choose(const std::vector<Near>& candidates, int most, std::vector<std::uint32_t>& chosen) {
        for (const Near& candidate : candidates) {
            if (static_cast<int>(chosen.size()) >= most) return;
            measure(candidate.token, chosen);
            const bool hidden = std::any_of(distances_.begin(), distances_.end(),
                                            [&](float d) { return d < candidate.distance; });
            if (!hidden) chosen.push_back(candidate.token);
        }
    }

    void link_back(std::uint32_t from, std::uint32_t to, SpanningTree& tree) {
        std::uint32_t* links = links_of(from);
        const int used = count(links);
        if (used < graph_.degree) {
            links[used] = to;
            if (!tree.reached(to)) tree.set_parent(to, from);
            return;
        }
        std::vector<std::uint32_t> others(1, to), chosen;
        for (int j = 0; j < used; ++j) {
            (tree.is_tree_edge(from, links[j]) ? chosen : others).push_back(links[j]);
        }
        choose(by_distance(from, others), graph_.degree, chosen);
        std::fill_n(links, graph_.degree, kNoToken);
        std::copy(chosen.begin(), chosen.end(), links);
        const bool kept = std::find(chosen.begin(), chosen.end(), to) != chosen.end();
        if (kept && !tree.reached(to)) tree.set_parent(to, from);
    }

    const Graph& graph_;
    const Blocks& blocks_;
    const int kv_head_;
    std::vector<float> key_, distances_;
    Visited visited_;
};

}  // namespace

void insert(const Graph& graph, const Blocks& blocks, std::int64_t begin, int width,
            std::uint32_t* parents) {
    ThreadPool& pool = ThreadPool::instance();
    pool.run(graph.kv_heads, pool.threads(), [&](std::int64_t head, int) {
        Linker linker(graph, blocks, static_cast<int>(head));
        SpanningTree tree(graph, static_cast<int>(head), parents + head * graph.capacity);
        std::uint32_t* links = graph.links_of(static_cast<int>(head));
        for (std::int64_t token = begin; token < graph.tokens; ++token) {
            std::fill_n(links + token * graph.link_step, graph.degree, kNoToken);
        }
        for (std::int64_t token = begin; token < graph.tokens; ++token) {
            linker.insert(static_cast<std::uint32_t>(token), width, tree);
        }
    });
}

void connect(const Graph& graph, const Blocks& blocks, int kv_head, const std::int32_t* pivots,
             std::int64_t count, const std::int64_t* offsets, const std::int32_t* candidates) {
    Linker linker(graph, blocks, kv_head);
    for (std::int64_t i = 0; i < count; ++i) {
        linker.connect(static_cast<std::uint32_t>(pivots[i]),
                       {candidates + offsets[i], candidates + offsets[i + 1]});
    }
}

void choose_links(const Graph& graph, const Blocks& blocks, int kv_head, std::int64_t begin,
                  std::int64_t count, const std::int64_t* offsets, const std::int32_t* candidates,
                  int most, std::uint32_t* chosen) {
    constexpr std::int64_t chunk = 64;
    ThreadPool& pool = ThreadPool::instance();
    pool.run((count + chunk - 1) / chunk, pool.threads(), [&](std::int64_t item, int) {
        Linker linker(graph, blocks, kv_head);
        for (std::int64_t i = item * chunk; i < std::min(count, (item + 1) * chunk); ++i) {
            linker.choose_of(static_cast<std::uint32_t>(begin + i),
                             {candidates + offsets[i], candidates + offsets[i + 1]}, most,
                             chosen + i * most);
        }
    });
}

}  // namespace kvdb::indexes::graph
