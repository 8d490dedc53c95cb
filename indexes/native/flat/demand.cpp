#include "demand.h"

#include <algorithm>
#include <cmath>

#include "rotate.h"

namespace kvdb::indexes {
namespace {

constexpr std::int64_t kFewTokens = 8192;  // a row that sees fewer is always answered
constexpr std::int64_t kEvery = 16;        // one chunk of so many is looked at
constexpr std::int64_t kChunksMin = 2, kChunksMax = 16;
constexpr double kFewByLength = 1.0 / 16;  // so few keys long enough are worth a search
// What searching for a tile costs, in reads of all keys and values: all codes, and of its rows'
// shares the keys, then the values. Measured on one machine, with bfloat16 of 128 dimensions.
constexpr double kCodes = 0.6, kFound = 2.5;
constexpr double kWorth = 0.8;  // a search that is expected to cost more is not begun

}  // namespace

Demand::Demand(const Batch& batch, Thresholds& thresholds, int threads, float scale)
    : batch_(batch),
      thresholds_(thresholds),
      scale_(scale),
      looked_(threads),
      bounds_(batch.heads * batch.rows) {
    const std::int64_t count =
        std::min(batch.chunks, std::clamp(batch.chunks / kEvery, kChunksMin, kChunksMax));
    for (std::int64_t c = 0; c < count; ++c) {
        chunks_.push_back(batch.first_chunk + batch.chunks * (2 * c + 1) / (2 * count));
    }
}

void Demand::judge(const Tile& tile, Scanner& scanner, int thread) {
    bool hungry[kTile] = {};
    if (!any_hungry(tile, scanner, hungry)) return;
    const Shares shares = this->shares(tile, scanner, thread);
    double cost = kCodes;
    for (int r = 0; r < tile.rows; ++r) cost += hungry[r] ? shares.of[r] * kFound : 0;
    if (cost <= kWorth) return;
    for (int r = 0; r < tile.rows; ++r) {
        if (hungry[r]) thresholds_.drop(tile.row(r));
    }
    bound_all(tile);
}

// Rows for which codes must be read, because lengths do not drop nearly all keys.
bool Demand::any_hungry(const Tile& tile, Scanner& scanner, bool* hungry) const {
    std::int64_t seen[kTile] = {}, left[kTile] = {};
    for (const std::int64_t chunk : chunks_) {
        FlatPrune prune;
        const bool aimed = scanner.aim(tile, chunk, prune);
        for (int r = 0; r < tile.rows; ++r) {
            std::uint64_t bits[kChunkWords];
            const std::int64_t count = visible_bits(batch_.queries, query(tile, r), chunk, bits);
            seen[r] += count;
            left[r] += aimed ? scanner.by_length_of(r, prune, bits) : count;
        }
    }
    bool any = false;
    for (int r = 0; r < tile.rows; ++r) {
        hungry[r] = batch_.visible[query(tile, r)] >= kFewTokens &&
                    static_cast<double>(left[r]) > kFewByLength * static_cast<double>(seen[r]);
        any = any || hungry[r];
    }
    return any;
}

Demand::Shares Demand::shares(const Tile& tile, Scanner& scanner, int thread) {
    const FlatWanted& wanted = thresholds_.wanted();
    Shares shares;
    if (!thresholds_.by_rank() && wanted.beta < INFINITY) {
        if (look(tile, scanner, looked_[thread])) {
            for (int r = 0; r < tile.rows; ++r) shares.of[r] = passing(tile, r, looked_[thread]);
        }
        return shares;
    }
    for (int r = 0; r < tile.rows; ++r) {
        const std::int64_t visible = batch_.visible[query(tile, r)];
        const std::int64_t count = thresholds_.by_rank() ? std::min(wanted.k, visible) : visible;
        shares.of[r] =
            static_cast<double>(count) / static_cast<double>(std::max<std::int64_t>(visible, 1));
    }
    return shares;
}

// Looks at the chunks, each with what is known by then. False where nothing is known of some row.
bool Demand::look(const Tile& tile, Scanner& scanner, std::vector<Looked>& looked) const {
    looked.resize(chunks_.size());
    for (std::size_t c = 0; c < chunks_.size(); ++c) {
        if (!scanner.aim(tile, chunks_[c], looked[c].prune)) return false;
        batch_.seen(tile, chunks_[c], looked[c].bits);
        scanner.by_length(looked[c].prune, looked[c].bits);
        scanner.by_code(looked[c].prune, looked[c].bits);
        scanner.climb(tile, chunks_[c], looked[c].prune, looked[c].bits);
    }
    return true;
}

// The share of what a row sees there that it may want, as far as is known after all of them.
double Demand::passing(const Tile& tile, int r, const std::vector<Looked>& looked) const {
    const float least = thresholds_.of(tile.row(r));
    std::int64_t seen = 0, passed = 0;
    for (std::size_t c = 0; c < chunks_.size(); ++c) {
        std::uint64_t bits[kChunkWords];
        seen += visible_bits(batch_.queries, query(tile, r), chunks_[c], bits);
        for (int w = 0; w < kChunkWords; ++w) bits[w] &= looked[c].bits[w];
        each_bit(bits, [&](int key) { passed += !(looked[c].prune.upper[r][key] < least); });
    }
    return seen ? static_cast<double>(passed) / static_cast<double>(seen) : 0;
}

// By the longest key of each chunk.
void Demand::bound_all(const Tile& tile) {
    double top[kTile], sum[kTile] = {};
    std::fill_n(top, kTile, -INFINITY);
    for (std::int64_t c = batch_.first_chunk; c < batch_.first_chunk + batch_.chunks; ++c) {
        const std::int64_t at = batch_.at(tile, c);
        const FlatScan scan = make_scan(batch_.codes, *tile.coded, at);
        const float longest = from_bfloat16(scan.lengths[batch_.codes.longest[at] % kChunk]);
        for (int r = 0; r < tile.rows; ++r) {
            std::uint64_t bits[kChunkWords];
            const std::int64_t count = visible_bits(batch_.queries, query(tile, r), c, bits);
            if (count == 0) continue;
            const double upper = scale_ * (double{scan.base[r]} + scan.slack[r] +
                                           double{tile.coded->norm[r]} * longest);
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
