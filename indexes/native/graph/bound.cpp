// The bound of the mass that a search missed, computed from the codes of all keys.
#include <algorithm>
#include <cmath>

#include "graph.h"
#include "quantized_queries.h"
#include "query_group.h"
#include "thread_pool.h"

namespace kvdb::indexes::graph {

namespace {

constexpr std::int64_t kTogether = 512;  // keys estimated together

// Adds exp(scale * score) of a chunk to a sum that is relative to `largest`.
struct LogSum {
    double sum = 0;
    float largest = kNone;

    void add(const float* scores, std::int64_t count, float scale) {
        const float chunk = *std::max_element(scores, scores + count);
        if (chunk == kNone) return;
        if (chunk > largest) {
            sum *= std::exp(double{scale} * (largest - chunk));
            largest = chunk;
        }
        sum += double{graph_kernels().mass(scores, count, largest, scale)};
    }
    float log(float scale) const {
        return largest == kNone ? kNone
                                : static_cast<float>(double{scale} * largest + std::log(sum));
    }
};

// A query quantized twice: the second time its residual, so that only the key's code adds to the
// error of an estimate.
struct SharpQuery {
    QuantizedQueries quantized;
    float length = 0, error = 0;

    void quantize(const Graph& graph, int kv_head, const float* q) {
        std::vector<float> rest(graph.head_dim);
        quantized.resize(2, graph.stride);
        quantized.quantize(0, graph, kv_head, q, rest.data());
        quantized.quantize_weights(1, graph, rest.data());
        double square = 0, left = 0, sums = 0;
        for (int i = 0; i < graph.head_dim; ++i) {
            square += double{q[i]} * q[i];
            left += std::abs(rest[i]);
            sums += std::abs(double{q[i]}) * (std::abs(graph.low[kv_head * graph.head_dim + i]) +
                                              256.0 * graph.step[kv_head * graph.head_dim + i]);
        }
        length = static_cast<float>(std::sqrt(square) * (1 + 1e-5));
        // The residual of the quantized query, and the rounding of float32.
        error = static_cast<float>(128 * left + 1e-6 * sums);
    }
};

}  // namespace

void bound(const Graph& graph, const QueryRows& queries, float scale, const std::int64_t* offsets,
           const std::int32_t* ids, float* bound) {
    ThreadPool& pool = ThreadPool::instance();
    const std::int64_t rows = queries.rows() * graph.kv_heads;
    pool.run(rows, pool.threads(), [&](std::int64_t row, int) {
        const int kv_head = static_cast<int>(row / queries.rows());
        bound[row] = kNone;
        if (!queries.is_active(kv_head)) return;
        const std::int64_t query = row % queries.n, end = queries.end[query];
        SharpQuery sharp;
        sharp.quantize(graph, kv_head, queries.q + row * graph.head_dim);
        const std::uint8_t* codes = graph.codes_of(kv_head);
        const float* residual = graph.residual + kv_head * graph.capacity;
        const std::int32_t *next = ids + offsets[row], *last = ids + offsets[row + 1];
        float scores[2 * kTogether];
        LogSum sum;
        for (std::int64_t at = queries.begin[query]; at < end; at += kTogether) {
            const std::int64_t count = std::min(kTogether, end - at);
            graph_kernels().estimate({codes + at * graph.code_step, graph.stride, graph.code_step,
                                      nullptr, count, sharp.quantized.bytes.data(),
                                      sharp.quantized.factor.data(), sharp.quantized.bias.data(), 2,
                                      scores, kTogether});
            for (std::int64_t t = 0; t < count; ++t) {
                scores[t] += scores[kTogether + t] + sharp.length * residual[at + t] + sharp.error;
                if (queries.is_hidden(at + t)) scores[t] = kNone;
            }
            for (; next < last && *next < at + count; ++next) {
                if (*next >= at) scores[*next - at] = kNone;
            }
            sum.add(scores, count, scale);
        }
        bound[row] = sum.log(scale) + 1e-5f;
    });
}

}  // namespace kvdb::indexes::graph
