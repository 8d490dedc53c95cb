#include "search.h"

#include <algorithm>
#include <cmath>

#include "row_collector.h"
#include "tile_search.h"

namespace kvdb::indexes::coarse {
namespace {

constexpr double kLn2 = 0.6931471805599453;
constexpr std::int64_t kRowsTogether = 16;  // of a KV head, whose reads are shared

// The segments of which some query sees a token.
std::vector<Segment> segments_of(const std::vector<Pages>& batches, const QueryRows& queries) {
    std::vector<Segment> segments;
    if (queries.n == 0) return segments;
    const std::int64_t first = *std::min_element(queries.begin, queries.begin + queries.n);
    const std::int64_t last = *std::max_element(queries.end, queries.end + queries.n);
    std::int64_t pages = 0;
    for (const Pages& batch : batches) {
        for (std::int64_t s = 0; s < batch.segments; ++s) {
            const std::int64_t begin = batch.begin + s * batch.tokens;
            if (begin >= last || begin + batch.tokens <= first) continue;
            segments.push_back({&batch, s, begin, begin + batch.tokens, pages});
            pages += batch.pages;
        }
    }
    return segments;
}

// Rows as one array after the other.
SearchResult gather(const std::vector<Row>& rows, const CoarseOptions& options, int value_dim) {
    SearchResult out;
    out.resize(std::int64_t(rows.size()), options.tail ? value_dim : 0);
    std::int64_t count = 0;
    for (const Row& row : rows) count += std::int64_t(row.ids.size());
    out.retrieved.reserve(count);
    for (std::int64_t r = 0; r < std::int64_t(rows.size()); ++r) {
        const Row& row = rows[r];
        out.retrieved.append(row.ids, row.scores);
        out.set_missed(r, row.missed.log2() * kLn2, row.bound.log2() * kLn2);
        out.dense[r] = row.dense;
        if (!options.tail) continue;
        const auto share = static_cast<float>(row.tail_weight > 0 ? 1 / row.tail_weight : 0);
        for (int i = 0; i < value_dim; ++i) out.tail[r * value_dim + i] = row.tail[i] * share;
    }
    return out;
}

}  // namespace

SearchResult search(const Blocks& blocks, const std::vector<Pages>& batches,
                    const QueryRows& queries, const CoarseOptions& options) {
    const Geometry& geometry = blocks.geometry;
    const std::vector<Segment> segments = segments_of(batches, queries);
    const bool box = !batches.empty() && batches[0].box;
    const bool priorities = !batches.empty() && batches[0].all.farthest;
    std::vector<Row> rows(geometry.kv_heads * queries.rows());
    const std::int64_t each = std::max<std::int64_t>(1, kRowsTogether / queries.group);
    const auto heads = std::int64_t(queries.heads(geometry.kv_heads).size());
    std::int64_t scanned = 0, nbytes = 0;
    for (std::int64_t i = 0; i < queries.n; i += each) {
        Tile tile(segments, queries, geometry, i, std::min(each, queries.n - i), box, priorities);
        TileSearch tile_search(blocks, segments, queries, options, tile);
        tile_search.run();
        RowCollector(blocks, queries, options, tile, tile_search).run(rows);
        for (const Segment& segment : segments) {
            const Pages& pages = *segment.pages;
            const bool radius = pages.all.radius, farthest = pages.all.farthest;
            const std::int64_t page_bytes = pages.center_dims() + 4 + (radius ? 12 : 0) +
                                            (farthest ? geometry.head_dim + 4 : 0);
            scanned += heads * pages.pages;
            nbytes += heads * pages.pages * page_bytes;
        }
        for (const std::int64_t tokens : tile_search.read) {
            scanned += tokens;
            nbytes += tokens * std::int64_t(geometry.key_row_bytes());
        }
    }
    SearchResult out = gather(rows, options, geometry.value_dim);
    out.scanned = scanned;
    out.nbytes = nbytes;
    return out;
}

}  // namespace kvdb::indexes::coarse
