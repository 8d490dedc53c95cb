#include <algorithm>
#include <cmath>

#include "beam_search.h"
#include "graph.h"
#include "thread_pool.h"

namespace kvdb::indexes::graph {

namespace {

constexpr int kRowsMax = 8;  // query heads that search together
constexpr std::int64_t kScanMax =
    4096;  // up to so many visible tokens a scan is faster than a search

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

// Searches for one group of query heads. Rows that gave up are scanned in full, unless the caller
// lets them.
void search_group(BeamSearch& searcher, QueryGroup group, RowResult* rows, std::int64_t& scanned,
                  std::int64_t& nbytes) {
    const GraphOptions& options = group.options;
    group.scan = group.visible <= kScanMax ||
                 static_cast<double>(options.k) >
                     double{options.dense_share} * static_cast<double>(group.visible);
    searcher.run(group, rows);
    scanned = searcher.scanned();
    nbytes = searcher.nbytes();
    if (options.give_up) return;
    std::uint8_t again[kRowsMax];
    bool any = false;
    for (int r = 0; r < group.heads; ++r) any |= (again[r] = rows[r].dense);
    if (!any) return;
    group.scan = true;
    group.rows = again;
    searcher.run(group, rows);
    scanned = std::max(scanned, searcher.scanned());
    nbytes += searcher.nbytes();
}

SearchResult collect(std::vector<RowResult>& rows) {
    SearchResult result;
    std::int64_t count = 0;
    for (const RowResult& row : rows) count += static_cast<std::int64_t>(row.ids.size());
    result.retrieved.reserve(count);
    for (const RowResult& row : rows) {
        result.retrieved.append(row.ids, row.scores);
        result.missed.push_back(row.missed);
        result.bound.push_back(row.bound);
        result.dense.push_back(row.dense);
    }
    return result;
}

}  // namespace

SearchResult search(const Graph& graph, const Probes& probes, const Blocks& blocks,
                    const QueryRows& queries, const GraphOptions& options) {
    const std::vector<std::int64_t> visible = count_visible(queries);
    const int together = options.share ? std::min(queries.group, kRowsMax) : 1;
    const std::int64_t parts = (queries.group + together - 1) / together;
    const std::vector<int> active = queries.heads(graph.kv_heads);
    const std::int64_t items = parts * static_cast<std::int64_t>(active.size()) * queries.n;
    // [kv_heads][n][group] here, so that an item's rows lie together
    std::vector<RowResult> rows(queries.rows() * graph.kv_heads);
    std::vector<std::int64_t> scanned(items), nbytes(items);
    ThreadPool& pool = ThreadPool::instance();
    pool.run(items, pool.threads(), [&](std::int64_t item, int) {
        thread_local BeamSearch searcher;
        const int kv_head = active[item / (parts * queries.n)];
        const std::int64_t query = item / parts % queries.n;
        const int head = static_cast<int>(item % parts) * together;
        const int heads = std::min(together, queries.group - head);
        RowResult* to = rows.data() + (kv_head * queries.n + query) * queries.group + head;
        search_group(searcher,
                     {graph, probes, blocks, queries, options, kv_head, query, head, heads,
                      visible[query], nullptr, false},
                     to, scanned[item], nbytes[item]);
    });
    std::vector<RowResult> ordered(rows.size());
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

}  // namespace kvdb::indexes::graph
