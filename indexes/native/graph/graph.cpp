#include "graph.h"

#include <algorithm>

#include "thread_pool.h"

namespace kvdb::indexes {

const GraphKernels& graph_kernels() {
    static constexpr PerIsa<GraphKernels> kernels{KVDB_PER_ISA(graph)};
    return kernels.current();
}

void encode(const Graph& graph, const Blocks& blocks, int kv_head, std::int64_t begin,
            std::int64_t end) {
    constexpr std::int64_t chunk = 4096;
    ThreadPool& pool = ThreadPool::instance();
    pool.run((end - begin + chunk - 1) / chunk, pool.threads(), [&](std::int64_t item, int) {
        const std::int64_t from = begin + item * chunk;
        const std::int64_t head = std::int64_t{kv_head};
        graph_kernels().encode[static_cast<int>(blocks.geometry.dtype)](
            {blocks, kv_head, from, std::min(chunk, end - from),
             graph.low + head * graph.head_dim, graph.step + head * graph.head_dim,
             graph.codes + (head * graph.capacity + from) * graph.stride, graph.stride,
             graph.residual + head * graph.capacity + from});
    });
}

std::int64_t reachable(const Graph& graph, int kv_head, const std::int32_t* starts,
                       std::int64_t count) {
    std::vector<bool> met(graph.tokens);
    std::vector<std::uint32_t> next;
    std::int64_t reached = 0;
    const auto meet = [&](std::uint32_t token) {
        if (met[token]) return;
        met[token] = true;
        ++reached;
        next.push_back(token);
    };
    for (std::int64_t i = 0; i < count; ++i) meet(starts[i]);
    while (!next.empty()) {
        const std::uint32_t* links =
            graph.links_of(kv_head) + std::int64_t{next.back()} * graph.degree;
        next.pop_back();
        for (int j = 0; j < graph.degree && links[j] < graph.tokens; ++j) meet(links[j]);
    }
    return reached;
}

}  // namespace kvdb::indexes
