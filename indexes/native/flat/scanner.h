// One thread's scan of chunks: by lengths, by codes, and exactly.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"
#include "cache_line.h"
#include "thresholds.h"

namespace kvdb::indexes::flat {

class alignas(kApart) Scanner {
  public:
    Scanner(const Batch& batch, Thresholds& thresholds);

    // Collects the tokens of some chunks that may reach a row's threshold: `start`, `scan` each
    // chunk in ascending order, `finish`. Then `tokens` ascend, and `scores` are their exact
    // scores.
    void start();
    // Returns false if the chunk is better scanned later, when thresholds are higher. patient:
    // whether it may do so.
    bool scan(const Tile& tile, std::int64_t chunk, bool patient);
    void finish(const Tile& tile);
    const std::vector<std::int32_t>& tokens() const { return tokens_; }
    const float* scores(int r) const { return &scores_[r * scores_stride_]; }

    // Scores `tokens` exactly.
    void score(const Tile& tile, const std::vector<std::int32_t>& tokens);

    // The steps of a scan. `bits` are keys, in and out; each step returns how many are left.
    // Returns false where some row has no threshold, so that codes are of no use.
    bool prepare_prune(const Tile& tile, std::int64_t chunk, FlatPrune& prune) const;
    std::int64_t by_length(const FlatPrune& prune, std::uint64_t* bits);
    std::int64_t by_length_of(int r, const FlatPrune& prune, std::uint64_t* bits) const;
    std::int64_t by_code(FlatPrune& prune, std::uint64_t* bits);
    // Scores the key of `bits` with the highest bound for each row, for better thresholds.
    void raise_thresholds(const Tile& tile, std::int64_t chunk, const FlatPrune& prune,
                          const std::uint64_t* bits);

    // Prefetches the data that is read of every chunk.
    void prefetch(std::int64_t at) const;

    std::int64_t nbytes() const { return nbytes_; }  // read so far

    // Up to this many keys of a chunk are scanned one by one, by their signs: slower for each key
    // than all codes of the chunk together, but less to read.
    static constexpr int kSparse = kChunk / 2;

  private:
    void prepare_sieve(const FlatPrune& prune, std::int64_t chunk, const std::uint64_t* bits);
    void sieve(FlatSieve& sieve, std::int64_t chunk);
    // Clears keys whose bounds miss the thresholds that now hold.
    std::int64_t prune_again(const Tile& tile, const FlatPrune& prune, std::uint64_t* bits) const;

    const Batch& batch_;
    Thresholds& thresholds_;
    std::vector<std::int32_t> tokens_;
    std::vector<float> scores_;  // [rows][scores_stride_]
    std::size_t scores_stride_ = 0;
    std::vector<FlatSieve> sieves_;
    std::vector<std::int64_t> sieved_;  // chunks
    std::size_t sieves_used_ = 0;
    std::int64_t nbytes_ = 0;
};

}  // namespace kvdb::indexes::flat
