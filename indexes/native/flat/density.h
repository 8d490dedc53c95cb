// Rows whose range is so dense that reading every key and value costs less than searching.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"
#include "cache_line.h"
#include "scanner.h"
#include "thresholds.h"

namespace kvdb::indexes::flat {

// Judges by some evenly spread chunks, which do not depend on the threads: the share of keys that
// passes the codes there is assumed to pass everywhere. The rows of a tile share reads, in a search
// and in a full read, so they are given up together, except rows that lengths alone answer and rows
// that see few tokens.
class Density {
  public:
    Density(const Batch& batch, Thresholds& thresholds, int threads, float scale);

    // Drops the most expensive rows of a tile, as long as the others together cost more than
    // reading everything.
    void drop_dense(const Tile& tile, Scanner& scanner, int thread);

    // An upper bound of the log of the sum of exp(scale * q.k) over all tokens that a dropped row
    // sees.
    float bound(std::int64_t row) const { return bounds_[row]; }

  private:
    struct ScannedChunk {  // and its keys that may reach the threshold of some row
        std::uint64_t bits[kChunkWords];
        FlatPrune prune;
    };
    struct Fractions {  // the fraction of its visible tokens that each row reads
        double of[kTile] = {};
    };

    std::int64_t query(const Tile& tile, int r) const { return batch_.query_of(tile.row(r)); }
    bool any_costly(const Tile& tile, Scanner& scanner, bool* costly) const;
    Fractions fractions(const Tile& tile, Scanner& scanner, int thread);
    bool scan(const Tile& tile, Scanner& scanner, std::vector<ScannedChunk>& scanned) const;
    double passing(const Tile& tile, int r, const std::vector<ScannedChunk>& scanned) const;
    void bound_all(const Tile& tile);

    const Batch& batch_;
    Thresholds& thresholds_;
    const float scale_;
    std::vector<std::int64_t> chunks_;                       // those scanned
    std::vector<Apart<std::vector<ScannedChunk>>> scanned_;  // of each thread
    std::vector<float> bounds_;
};

}  // namespace kvdb::indexes::flat
