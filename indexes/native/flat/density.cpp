#include "density.h"

#include <algorithm>
#include <cmath>

#include "../rotate.h"

namespace kvdb::indexes::flat {
namespace {

constexpr std::int64_t kFewTokens = 8192;  // a row that sees fewer is always answered
constexpr std::int64_t kEvery = 16;        // one chunk in this many is scanned
constexpr std::int64_t kChunksMin = 2, kChunksMax = 16;
constexpr double kFewByLength = 1.0 / 16;  // if so few keys are long enough, a search pays
// The cost of searching for a tile, in units of reading all keys and values: for all codes, and for
// the keys and then the values of its rows' shares. Measured on one machine, with bfloat16 of 128
// dimensions.
constexpr double kCodes = 0.6, kRetrieved = 2.5;
constexpr double kWorth = 0.8;  // a search that is expected to cost more is not begun

}  // namespace

Density::Density(const Batch& batch, Thresholds& thresholds, int threads, float scale)
    : batch_(batch),
      thresholds_(thresholds),
      scale_(scale),
      scanned_(threads),
      bounds_(batch.heads * batch.rows) {
    const std::int64_t count =
        std::min(batch.chunks, std::clamp(batch.chunks / kEvery, kChunksMin, kChunksMax));
    for (std::int64_t c = 0; c < count; ++c) {
        chunks_.push_back(batch.first_chunk + batch.chunks * (2 * c + 1) / (2 * count));
    }
}

void Density::drop_dense(const Tile& tile, Scanner& scanner, int thread) {
    bool costly[kTile] = {};
    if (!any_costly(tile, scanner, costly)) return;
    const Fractions fractions = this->fractions(tile, scanner, thread);
    double cost = kCodes;
    for (int r = 0; r < tile.rows; ++r) cost += costly[r] ? fractions.of[r] * kRetrieved : 0;
    if (cost <= kWorth) return;
    for (int r = 0; r < tile.rows; ++r) {
        if (costly[r]) thresholds_.drop(tile.row(r));
    }
    bound_all(tile);
}

// The rows for which codes must be read, because lengths do not exclude nearly all keys.
bool Density::any_costly(const Tile& tile, Scanner& scanner, bool* costly) const {
    std::int64_t seen[kTile] = {}, left[kTile] = {};
    for (const std::int64_t chunk : chunks_) {
        FlatPrune prune;
        const bool prepared = scanner.prepare_prune(tile, chunk, prune);
        for (int r = 0; r < tile.rows; ++r) {
            std::uint64_t bits[kChunkWords];
            const std::int64_t count = visible_bits(batch_.queries, query(tile, r), chunk, bits);
            seen[r] += count;
            left[r] += prepared ? scanner.by_length_of(r, prune, bits) : count;
        }
    }
    bool any = false;
    for (int r = 0; r < tile.rows; ++r) {
        costly[r] = batch_.visible[query(tile, r)] >= kFewTokens &&
                    static_cast<double>(left[r]) > kFewByLength * static_cast<double>(seen[r]);
        any = any || costly[r];
    }
    return any;
}

Density::Fractions Density::fractions(const Tile& tile, Scanner& scanner, int thread) {
    const FlatOptions& options = thresholds_.options();
    Fractions fractions;
    if (!thresholds_.by_rank() && options.beta < INFINITY) {
        if (scan(tile, scanner, scanned_[thread].value)) {
            for (int r = 0; r < tile.rows; ++r)
                fractions.of[r] = passing(tile, r, scanned_[thread].value);
        }
        return fractions;
    }
    for (int r = 0; r < tile.rows; ++r) {
        const std::int64_t visible = batch_.visible[query(tile, r)];
        const std::int64_t count = thresholds_.by_rank() ? std::min(options.k, visible) : visible;
        fractions.of[r] =
            static_cast<double>(count) / static_cast<double>(std::max<std::int64_t>(visible, 1));
    }
    return fractions;
}

// Scans the chunks, each with the thresholds known by then. False if some row has no threshold.
bool Density::scan(const Tile& tile, Scanner& scanner, std::vector<ScannedChunk>& scanned) const {
    scanned.resize(chunks_.size());
    for (std::size_t c = 0; c < chunks_.size(); ++c) {
        if (!scanner.prepare_prune(tile, chunks_[c], scanned[c].prune)) return false;
        batch_.seen(tile, chunks_[c], scanned[c].bits);
        scanner.by_length(scanned[c].prune, scanned[c].bits);
        scanner.by_code(scanned[c].prune, scanned[c].bits);
        scanner.raise_thresholds(tile, chunks_[c], scanned[c].prune, scanned[c].bits);
    }
    return true;
}

// The fraction of a row's visible tokens in those chunks that may reach its threshold.
double Density::passing(const Tile& tile, int r, const std::vector<ScannedChunk>& scanned) const {
    const float least = thresholds_.of(tile.row(r));
    std::int64_t seen = 0, passed = 0;
    for (std::size_t c = 0; c < chunks_.size(); ++c) {
        std::uint64_t bits[kChunkWords];
        seen += visible_bits(batch_.queries, query(tile, r), chunks_[c], bits);
        for (int w = 0; w < kChunkWords; ++w) bits[w] &= scanned[c].bits[w];
        each_bit(bits, [&](int key) { passed += !(scanned[c].prune.upper[r][key] < least); });
    }
    return seen ? static_cast<double>(passed) / static_cast<double>(seen) : 0;
}

// Bounds the mass of everything the rows of a tile see, by the longest key of each chunk.
void Density::bound_all(const Tile& tile) {
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

}  // namespace kvdb::indexes::flat
