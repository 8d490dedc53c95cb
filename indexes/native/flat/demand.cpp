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
constexpr double kCodes = 0.5, kFound = 8;

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
    const Shares shares = this->shares(tile, scanner, thread);
    bool dropped = false;
    for (;;) {
        double cost = kCodes;
        int dearest = -1;
        for (int r = 0; r < tile.rows; ++r) {
            if (thresholds_.dropped(tile.row(r)) || shares.of[r] == 0) continue;
            cost += shares.of[r] * kFound;
            if (dearest < 0 || shares.of[r] > shares.of[dearest]) dearest = r;
        }
        if (cost <= 1) break;
        thresholds_.drop(tile.row(dearest));
        dropped = true;
    }
    if (dropped) bound_all(tile);
}

Demand::Shares Demand::shares(const Tile& tile, Scanner& scanner, int thread) {
    Shares shares;
    const FlatWanted& wanted = thresholds_.wanted();
    bool many[kTile], some = false;
    for (int r = 0; r < tile.rows; ++r) {
        const std::int64_t visible = batch_.visible[batch_.query_of(tile.row(r))];
        some |= many[r] = visible >= kFewTokens;
        if (!many[r]) continue;
        shares.of[r] = thresholds_.by_rank() && wanted.k < visible
                           ? static_cast<double>(wanted.k) / static_cast<double>(visible)
                           : 1;
    }
    if (thresholds_.by_rank() || wanted.beta == INFINITY) return shares;
    if (!some || few_by_length(tile, scanner)) return {};
    std::vector<Looked>& looked = looked_[thread];
    looked.resize(chunks_.size());
    std::int64_t seen[kTile] = {}, passed[kTile] = {};
    for (std::size_t c = 0; c < chunks_.size(); ++c) {
        looked[c].chunk = chunks_[c];
        batch_.seen(tile, chunks_[c], looked[c].bits);
        if (!scanner.aim(tile, chunks_[c], looked[c].prune)) return {};
        scanner.by_length(looked[c].prune, looked[c].bits);
        scanner.by_code(looked[c].prune, looked[c].bits);
        scanner.climb(tile, chunks_[c], looked[c].prune, looked[c].bits);
    }
    for (int r = 0; r < tile.rows; ++r) {
        if (!many[r]) continue;
        for (const Looked& at : looked) {
            std::uint64_t bits[kChunkWords];
            seen[r] += visible_bits(batch_.queries, batch_.query_of(tile.row(r)), at.chunk, bits);
            for (int w = 0; w < kChunkWords; ++w) bits[w] &= at.bits[w];
            passed[r] += passing(tile, r, at, bits);
        }
        shares.of[r] = seen[r] ? static_cast<double>(passed[r]) / static_cast<double>(seen[r]) : 0;
    }
    return shares;
}

// Whether lengths alone drop nearly all: the usual case of sharp rows, told without reading codes.
bool Demand::few_by_length(const Tile& tile, Scanner& scanner) const {
    std::int64_t seen = 0, left = 0;
    for (const std::int64_t chunk : chunks_) {
        std::uint64_t bits[kChunkWords];
        FlatPrune prune;
        seen += batch_.seen(tile, chunk, bits);
        if (!scanner.aim(tile, chunk, prune)) return false;
        left += scanner.by_length(prune, bits);
    }
    return static_cast<double>(left) <= kFewByLength * static_cast<double>(seen);
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
