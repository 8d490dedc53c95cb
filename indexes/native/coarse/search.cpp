#include "search.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "row_collector.h"
#include "tile_search.h"

namespace kvdb::indexes::coarse {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
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
CoarseResult gather(const std::vector<Row>& rows, const CoarseOptions& options, int head_dim) {
    CoarseResult out;
    std::int64_t count = 0;
    out.retrieved.offsets.push_back(0);
    for (const Row& row : rows) {
        count += std::int64_t(row.ids.size());
        out.retrieved.offsets.push_back(count);
    }
    out.retrieved.ids.reserve(count);
    out.retrieved.scores.reserve(count);
    for (const Row& row : rows) {
        out.retrieved.ids.insert(out.retrieved.ids.end(), row.ids.begin(), row.ids.end());
        out.retrieved.scores.insert(out.retrieved.scores.end(), row.scores.begin(),
                                    row.scores.end());
        const auto missed = static_cast<float>(row.missed.log2() * kLn2);
        // Rounded up by more than float32 can have rounded down.
        double bound = row.bound.log2() * kLn2;
        if (bound > kNone) bound += 1e-5 + 1e-6 * std::fabs(bound);
        out.missed_bound.push_back(static_cast<float>(bound));
        // If the estimate overflows, the bound is the best answer.
        const bool unknown = missed == kNone && out.missed_bound.back() > kNone;
        out.missed.push_back(unknown ? out.missed_bound.back()
                                     : std::min(missed, out.missed_bound.back()));
        out.dense.push_back(row.dense);
        if (!options.tail) continue;
        const auto share = static_cast<float>(row.tail_weight > 0 ? 1 / row.tail_weight : 0);
        for (int i = 0; i < head_dim; ++i) out.tail.push_back(row.tail[i] * share);
    }
    return out;
}

}  // namespace

CoarseResult search(const Blocks& blocks, const std::vector<Pages>& batches,
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
            nbytes += tokens * std::int64_t(geometry.row_bytes());
        }
    }
    CoarseResult out = gather(rows, options, geometry.head_dim);
    out.scanned = scanned;
    out.nbytes = nbytes;
    return out;
}

}  // namespace kvdb::indexes::coarse
