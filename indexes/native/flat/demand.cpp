#include "demand.h"

#include <algorithm>
#include <cmath>

#include "rotate.h"

namespace kvdb::indexes {
namespace {

constexpr std::int64_t kFewTokens = 4096;  // a row that sees fewer is always answered
constexpr std::int64_t kEvery = 16;        // one chunk of so many is looked at
constexpr std::int64_t kChunksMin = 2, kChunksMax = 16;
constexpr double kFewByLength = 1.0 / 32;  // with fewer keys long enough, codes are not asked
// What a tile's search costs, measured in reads of all keys and values: the codes of all keys, and
// each share of them that a row finds.
constexpr double kCodes = 0.6, kFound = 2.5;
constexpr double kWorth = 0.8;

}  // namespace

Demand::Demand(const Batch& batch, Thresholds& thresholds, int threads, float scale)
    : batch_(batch),
      thresholds_(thresholds),
      scale_(scale),
      looked_(threads),
      bounds_(batch.heads * batch.rows) {
    const std::int64_t count = std::min(
        batch.chunks, std::clamp(batch.chunks / kEvery, kChunksMin, kChunksMax));
    for (std::int64_t c = 0; c < count; ++c) {
        chunks_.push_back(batch.first_chunk + batch.chunks * (2 * c + 1) / (2 * count));
    }
}

void Demand::judge(const Tile& tile, Scanner& scanner, int thread) {
    bool hungry[kTile] = {};
    if (!any_hungry(tile, scanner, hungry)) return;
    const Shares shares = found(tile, scanner, thread);
    double cost = kCodes;
    for (int r = 0; r < tile.rows; ++r) cost += hungry[r] ? shares.of[r] * kFound : 0;
    if (cost <= kWorth) return;
    for (int r = 0; r < tile.rows; ++r) {
        if (hungry[r]) thresholds_.drop(tile.row(r));
    }
    bound_all(tile);
}

// Rows for which codes must be read, because lengths alone do not drop nearly all keys.
bool Demand::any_hungry(const Tile& tile, Scanner& scanner, bool* hungry) const {
    std::int64_t seen[kTile] = {}, left[kTile] = {};
    for (const std::int64_t chunk : chunks_) {
        FlatPrune prune;
        const bool aimed = scanner.aim(tile, chunk, prune);
        for (int r = 0; r < tile.rows; ++r) {
            std::uint64_t bits[kChunkWords];
            const std::int64_t count =
                visible_bits(batch_.queries, batch_.query_of(tile.row(r)), chunk, bits);
            seen[r] += count;
            left[r] += aimed ? scanner.by_length(prune, bits, r) : count;
        }
    }
    bool any = false;
    for (int r = 0; r < tile.rows; ++r) {
        hungry[r] = batch_.visible[batch_.query_of(tile.row(r))] >= kFewTokens &&
                    static_cast<double>(left[r]) > kFewByLength * static_cast<double>(seen[r]);
        any = any || hungry[r];
    }
    return any;
}

Demand::Shares Demand::found(const Tile& tile, Scanner& scanner, int thread) {
    const FlatWanted& wanted = thresholds_.wanted();
    Shares shares;
    std::vector<Looked>& looked = looked_[thread];
    looked.resize(chunks_.size());
    bool aimed = !thresholds_.by_rank();
    for (std::size_t c = 0; aimed && c < chunks_.size(); ++c) {
        looked[c].chunk = chunks_[c];
        batch_.seen(tile, chunks_[c], looked[c].bits);
        aimed = scanner.aim(tile, chunks_[c], looked[c].prune);
        if (!aimed) break;
        scanner.by_length(looked[c].prune, looked[c].bits);
        scanner.by_code(looked[c].prune, looked[c].bits);
        scanner.climb(tile, chunks_[c], looked[c].prune, looked[c].bits);
    }
    for (int r = 0; r < tile.rows; ++r) {
        const std::int64_t i = batch_.query_of(tile.row(r));
        std::int64_t seen = batch_.visible[i], passed = seen;
        if (thresholds_.by_rank()) passed = std::min(seen, wanted.k);
        if (aimed) seen = passed = 0;
        for (std::size_t c = 0; aimed && c < looked.size(); ++c) {
            std::uint64_t bits[kChunkWords];
            seen += visible_bits(batch_.queries, i, looked[c].chunk, bits);
            for (int w = 0; w < kChunkWords; ++w) bits[w] &= looked[c].bits[w];
            passed += passing(tile, r, looked[c], bits);
        }
        shares.of[r] = seen ? static_cast<double>(passed) / static_cast<double>(seen) : 0;
    }
    return shares;
}

// How many of `bits` the row may want.
std::int64_t Demand::passing(const Tile& tile, int r, const Looked& looked,
                             const std::uint64_t* bits) const {
    const float least = thresholds_.of(tile.row(r));
    std::int64_t count = 0;
    each_bit(bits, [&](int key) { count += !(looked.prune.upper[r][key] < least); });
    return count;
}

// By the longest key of each chunk.
void Demand::bound_all(const Tile& tile) {
    double top[kTile], sum[kTile] = {};
    std::fill_n(top, kTile, -INFINITY);
    for (std::int64_t c = batch_.first_chunk; c < batch_.first_chunk + batch_.chunks; ++c) {
        const std::int64_t at = batch_.at(tile, c);
        const FlatScan scan = make_scan(batch_.codes, *tile.coded, at);
        const float longest =
            from_bfloat16(scan.lengths[batch_.codes.longest[at] % kChunk]);
        for (int r = 0; r < tile.rows; ++r) {
            std::uint64_t bits[kChunkWords];
            const std::int64_t count =
                visible_bits(batch_.queries, batch_.query_of(tile.row(r)), c, bits);
            if (count == 0) continue;
            const double upper =
                scale_ * (double{scan.base[r]} + scan.slack[r] + double{tile.coded->norm[r]} * longest);
            const double larger = upper > top[r] ? upper : top[r];
            sum[r] = sum[r] * std::exp(top[r] - larger) +
                     static_cast<double>(count) * std::exp(upper - larger);
            top[r] = larger;
        }
    }
    for (int r = 0; r < tile.rows; ++r) {
        const double bound = top[r] + std::log(sum[r]) + 1e-5;
        bounds_[tile.row(r)] =
            std::isfinite(bound) ? std::nextafter(static_cast<float>(bound), INFINITY) : INFINITY;
    }
}

}  // namespace kvdb::indexes
