#include <algorithm>
#include <cmath>

#include "../score/kernels.h"
#include "graph.h"
#include "lens.h"
#include "thread_pool.h"
#include "walk.h"

namespace kvdb::indexes {

namespace {

constexpr int kRowsMax = 8;              // query heads that walk together
constexpr std::int64_t kScanMax = 4096;  // so few visible tokens are read sooner than walked to
constexpr std::int64_t kChunk = 512;

std::vector<std::int64_t> count_visible(const QueryRows& queries) {
    std::vector<std::int64_t> visible(queries.n);
    for (std::int64_t i = 0; i < queries.n; ++i) {
        const std::int64_t begin = queries.begin[i], end = queries.end[i];
        visible[i] = end - begin;
        for (std::int64_t t = begin; queries.hidden && t < end;) {
            const std::int64_t next = std::min((t / 64 + 1) * 64, end);
            const std::uint64_t word = queries.hidden[t / 64] >> (t % 64);
            const std::int64_t width = next - t;
            const std::uint64_t mask =
                width == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << width) - 1;
            visible[i] -= __builtin_popcountll(word & mask);
            t = next;
        }
    }
    return visible;
}

// The rows that gave up are read in full, if that is what the caller wants.
void walk(Walk& walker, Task task, RowFound* rows, std::int64_t& scanned, std::int64_t& nbytes) {
    SearchOptions& options = task.options;
    options.scan = options.scan || task.visible <= kScanMax ||
                   static_cast<double>(options.k) >
                       double{options.dense_share} * static_cast<double>(task.visible);
    walker.run(task, rows);
    scanned = walker.scanned();
    nbytes = walker.nbytes();
    if (options.give_up) return;
    std::uint8_t again[kRowsMax];
    bool any = false;
    for (int r = 0; r < task.heads; ++r) any |= (again[r] = rows[r].dense);
    if (!any) return;
    options.scan = true;
    task.rows = again;
    walker.run(task, rows);
    scanned = std::max(scanned, walker.scanned());
    nbytes += walker.nbytes();
}

SearchResult collect(std::vector<RowFound>& rows) {
    SearchResult result;
    result.found.offsets.assign(1, 0);
    for (const RowFound& row : rows) {
        result.found.offsets.push_back(result.found.offsets.back() +
                                       static_cast<std::int64_t>(row.ids.size()));
        result.missed.push_back(row.missed);
        result.bound.push_back(row.bound);
        result.dense.push_back(row.dense);
    }
    result.found.ids.reserve(result.found.offsets.back());
    result.found.scores.reserve(result.found.offsets.back());
    for (const RowFound& row : rows) {
        result.found.ids.insert(result.found.ids.end(), row.ids.begin(), row.ids.end());
        result.found.scores.insert(result.found.scores.end(), row.scores.begin(), row.scores.end());
    }
    return result;
}

}  // namespace

SearchResult search(const Graph& graph, const Probes& probes, const Blocks& blocks,
                    const QueryRows& queries, const SearchOptions& options) {
    const std::vector<std::int64_t> visible = count_visible(queries);
    const int together = options.share ? std::min(queries.group, kRowsMax) : 1;
    const std::int64_t parts = (queries.group + together - 1) / together;
    const std::vector<int> asked = queries.heads(graph.kv_heads);
    const std::int64_t items = parts * static_cast<std::int64_t>(asked.size()) * queries.n;
    // [kv_heads][n][group] here, so that an item's rows lie together
    std::vector<RowFound> rows(queries.rows() * graph.kv_heads);
    std::vector<std::int64_t> scanned(items), nbytes(items);
    ThreadPool& pool = ThreadPool::instance();
    pool.run(items, pool.threads(), [&](std::int64_t item, int) {
        thread_local Walk walker;
        const int kv_head = asked[item / (parts * queries.n)];
        const std::int64_t query = item / parts % queries.n;
        const int head = static_cast<int>(item % parts) * together;
        const int heads = std::min(together, queries.group - head);
        RowFound* to = rows.data() + (kv_head * queries.n + query) * queries.group + head;
        walk(walker,
             {graph, probes, blocks, queries, options, kv_head, query, head, heads, visible[query],
              nullptr},
             to, scanned[item], nbytes[item]);
    });
    std::vector<RowFound> ordered(rows.size());
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(rows.size()); ++row) {
        const std::int64_t head = row / queries.n, query = row % queries.n;
        ordered[row] = std::move(rows[(head / queries.group * queries.n + query) * queries.group +
                                      head % queries.group]);
    }
    SearchResult result = collect(ordered);
    for (const std::int64_t count : scanned) result.scanned += count;
    for (const std::int64_t count : nbytes) result.nbytes += count;
    return result;
}

namespace {

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

// A query in two lenses, the second for what the first leaves of it, so that the error of an
// estimate is that of the code.
struct Sharp {
    Lens lens;
    float length = 0, error = 0;

    void set(const Graph& graph, int kv_head, const float* q) {
        std::vector<float> rest(graph.head_dim);
        lens.resize(2, graph.stride);
        lens.set(0, graph, kv_head, q, rest.data());
        lens.set_bytes(1, graph, rest.data());
        double square = 0, left = 0, sums = 0;
        for (int i = 0; i < graph.head_dim; ++i) {
            square += double{q[i]} * q[i];
            left += std::abs(rest[i]);
            sums += std::abs(double{q[i]}) * (std::abs(graph.low[kv_head * graph.head_dim + i]) +
                                              256.0 * graph.step[kv_head * graph.head_dim + i]);
        }
        length = static_cast<float>(std::sqrt(square) * (1 + 1e-5));
        // What no lens holds of the query, and what float32 rounds off.
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
        if (!queries.is_asked(kv_head)) return;
        const std::int64_t query = row % queries.n, end = queries.end[query];
        Sharp sharp;
        sharp.set(graph, kv_head, queries.q + row * graph.head_dim);
        const std::uint8_t* codes = graph.codes_of(kv_head);
        const float* residual = graph.residual + kv_head * graph.capacity;
        const std::int32_t *next = ids + offsets[row], *last = ids + offsets[row + 1];
        float scores[2 * kChunk];
        LogSum sum;
        for (std::int64_t at = queries.begin[query]; at < end; at += kChunk) {
            const std::int64_t count = std::min(kChunk, end - at);
            graph_kernels().estimate({codes + at * graph.stride, graph.stride, nullptr, count,
                                      sharp.lens.bytes.data(), sharp.lens.factor.data(),
                                      sharp.lens.bias.data(), 2, scores, kChunk});
            for (std::int64_t t = 0; t < count; ++t) {
                scores[t] += scores[kChunk + t] + sharp.length * residual[at + t] + sharp.error;
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

}  // namespace kvdb::indexes
