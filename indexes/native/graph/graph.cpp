#include "graph.h"

#include <algorithm>

#include "thread_pool.h"

namespace kvdb::indexes::graph {

void encode(const Graph& graph, const Blocks& blocks, int kv_head, std::int64_t begin,
            std::int64_t end) {
    constexpr std::int64_t chunk = 4096;
    ThreadPool& pool = ThreadPool::instance();
    pool.run((end - begin + chunk - 1) / chunk, pool.threads(), [&](std::int64_t item, int) {
        const std::int64_t from = begin + item * chunk;
        const std::int64_t head = std::int64_t{kv_head};
        graph_kernels().encode[static_cast<int>(blocks.geometry.dtype)](
            {blocks, kv_head, from, std::min(chunk, end - from), graph.low + head * graph.head_dim,
             graph.step + head * graph.head_dim,
             graph.codes + (head * graph.capacity + from) * graph.code_step, graph.stride,
             graph.code_step, graph.residual + head * graph.capacity + from});
    });
}

}  // namespace kvdb::indexes::graph
