#include "scanner.h"

#include <cmath>
#include <cstring>

namespace kvdb::indexes::flat {
namespace {

constexpr int kMany = kChunk / 8;   // with more keys left, a better threshold is looked for
constexpr int kDense = kChunk / 2;  // with more even then, the chunk waits for one

void append(std::int64_t chunk, const std::uint64_t* bits, std::vector<std::int32_t>& tokens) {
    each_bit(bits,
             [&](int key) { tokens.push_back(static_cast<std::int32_t>(chunk * kChunk + key)); });
}

// The least length of a key that can reach a row's threshold: q.k <= q.centre + |q| * |k - centre|.
float least_length(const FlatPrune& prune, int r) {
    const float left = prune.threshold[r] - prune.scan.base[r] - prune.scan.slack[r];
    const float length = left / prune.scan.tile->norm[r] * (1 - 1e-6f);
    return length > 0 ? length : 0;  // or no number
}

// Returns how many of `bits` are left.
std::int64_t clear_shorter(const FlatPrune& prune, float length, std::uint64_t* bits) {
    std::uint32_t least;  // to bfloat16, rounded down
    std::memcpy(&least, &length, sizeof least);
    return flat_kernels().at_least(prune.scan.lengths, static_cast<std::uint16_t>(least >> 16),
                                   bits);
}

}  // namespace

Scanner::Scanner(const Batch& batch, Thresholds& thresholds)
    : batch_(batch), thresholds_(thresholds) {}

void Scanner::start() {
    tokens_.clear();
    sieves_used_ = 0;
}

bool Scanner::scan(const Tile& tile, std::int64_t chunk, bool patient) {
    std::uint64_t bits[kChunkWords];
    if (batch_.seen(tile, chunk, bits) == 0) return true;
    FlatPrune prune;
    if (!prepare_prune(tile, chunk, prune)) {
        append(chunk, bits, tokens_);
        return true;
    }
    std::int64_t left = by_length(prune, bits);
    if (left <= kSparse) {
        prepare_sieve(prune, chunk, bits);
        return true;
    }
    left = by_code(prune, bits);
    if (left > kMany && !thresholds_.by_rank()) {
        raise_thresholds(tile, chunk, prune, bits);
        left = prune_again(tile, prune, bits);
        if (patient && left > kDense) return false;
    }
    append(chunk, bits, tokens_);
    return true;
}

void Scanner::finish(const Tile& tile) {
    for (std::size_t u = 0; u < sieves_used_; ++u) sieve(sieves_[u], sieved_[u]);
    if (tokens_.empty()) return;
    // Thresholds rise, whether or not the chunk was put off.
    if (sieves_used_ > 0) std::sort(tokens_.begin(), tokens_.end());
    score(tile, tokens_);
}

void Scanner::score(const Tile& tile, const std::vector<std::int32_t>& tokens) {
    scores_stride_ = tokens.size();
    if (scores_.size() < kTile * scores_stride_) scores_.resize(kTile * scores_stride_);
    const auto count = static_cast<std::int64_t>(tokens.size());
    score_tokens({batch_.blocks, tile.head,
                  batch_.queries.q + tile.first_row * batch_.codes.head_dim, tile.rows,
                  tokens.data(), count, scores_.data(), count});
    nbytes_ += count * static_cast<std::int64_t>(batch_.blocks.geometry.key_row_bytes());
}

bool Scanner::prepare_prune(const Tile& tile, std::int64_t chunk, FlatPrune& prune) const {
    for (int r = 0; r < kTile; ++r) {
        prune.threshold[r] = thresholds_.of(tile.row(r));
        if (prune.threshold[r] == -INFINITY) return false;
    }
    prune.scan = make_scan(batch_.codes, *tile.coded, batch_.at(tile, chunk));
    return true;
}

void Scanner::prefetch(std::int64_t at) const {
    const FlatCodes& codes = batch_.codes;
    const auto* centre = reinterpret_cast<const char*>(codes.centre(at));
    for (int i = 0; i <= 4 * codes.head_dim; i += 64) __builtin_prefetch(centre + i);
    const auto* norms = reinterpret_cast<const char*>(codes.length(at, kNorm));
    for (int i = 0; i < 2 * kChunk; i += 64) __builtin_prefetch(norms + i);
}

std::int64_t Scanner::by_length(const FlatPrune& prune, std::uint64_t* bits) {
    float shortest = INFINITY;
    for (int r = 0; r < kTile; ++r) shortest = std::min(shortest, least_length(prune, r));
    const std::int64_t left = clear_shorter(prune, shortest, bits);
    nbytes_ += kChunk * 2;
    return left;
}

std::int64_t Scanner::by_length_of(int r, const FlatPrune& prune, std::uint64_t* bits) const {
    return clear_shorter(prune, least_length(prune, r), bits);
}

std::int64_t Scanner::by_code(FlatPrune& prune, std::uint64_t* bits) {
    prune.groups = 0;
    for (int g = 0; g < kChunkGroups; ++g) {
        const bool some = bits[g / 4] >> (g % 4 * kKeyGroup) & 0xffff;
        prune.groups |= std::uint64_t{some} << g;
    }
    flat_kernels().prune(prune);
    std::int64_t count = 0;
    for (int w = 0; w < kChunkWords; ++w) {
        bits[w] &= prune.kept[w];
        count += __builtin_popcountll(bits[w]);
    }
    const std::int64_t groups = __builtin_popcountll(prune.groups);
    const std::int64_t planes = groups + prune.refined;
    nbytes_ += kKeyGroup * (groups * 6 + planes * batch_.codes.head_dim / 2);
    return count;
}

void Scanner::raise_thresholds(const Tile& tile, std::int64_t chunk, const FlatPrune& prune,
                               const std::uint64_t* bits) {
    std::vector<std::int32_t> candidates, tokens;
    append(0, bits, candidates);
    if (candidates.empty()) return;
    for (int r = 0; r < tile.rows; ++r) {
        std::int32_t top = candidates.front();
        for (const std::int32_t key : candidates) {
            if (prune.upper[r][key] > prune.upper[r][top]) top = key;
        }
        tokens.push_back(static_cast<std::int32_t>(chunk * kChunk + top));
    }
    score(tile, tokens);
    for (int r = 0; r < tile.rows; ++r) {
        for (std::size_t t = 0; t < tokens.size(); ++t) {
            if (batch_.queries.visible(batch_.query_of(tile.row(r)), tokens[t])) {
                thresholds_.raise(tile.row(r), scores(r)[t]);
            }
        }
    }
}

std::int64_t Scanner::prune_again(const Tile& tile, const FlatPrune& prune,
                                  std::uint64_t* bits) const {
    float least[kTile];
    for (int r = 0; r < kTile; ++r) least[r] = thresholds_.of(tile.row(r));
    std::int64_t count = 0;
    each_bit(bits, [&](int key) {
        bool pruned = true;
        for (int r = 0; r < kTile; ++r) pruned &= prune.upper[r][key] < least[r];
        if (pruned) bits[key / 64] &= ~(1ull << key % 64);
        count += !pruned;
    });
    return count;
}

// Notes the keys whose signs will be looked at, and prefetches these.
void Scanner::prepare_sieve(const FlatPrune& prune, std::int64_t chunk, const std::uint64_t* bits) {
    if (sieves_used_ == sieves_.size()) {
        sieves_.emplace_back();
        sieved_.emplace_back();
    }
    FlatSieve& sieve = sieves_[sieves_used_];
    sieved_[sieves_used_++] = chunk;
    sieve.scan = prune.scan;
    std::copy_n(prune.threshold, kTile, sieve.threshold);
    sieve.count = 0;
    const int stride = FlatCodes::sign_bytes(batch_.codes.head_dim);
    each_bit(bits, [&](int key) {
        __builtin_prefetch(sieve.scan.signs + key * stride);
        __builtin_prefetch(sieve.scan.signs + (key + 1) * stride - 1);
        sieve.keys[sieve.count++] = static_cast<std::uint16_t>(key);
    });
    nbytes_ += std::int64_t{sieve.count} * stride;
}

void Scanner::sieve(FlatSieve& sieve, std::int64_t chunk) {
    flat_kernels().sieve(sieve);
    for (int i = 0; i < sieve.count; ++i) {
        tokens_.push_back(static_cast<std::int32_t>(chunk * kChunk + sieve.keys[i]));
    }
}

}  // namespace kvdb::indexes::flat
