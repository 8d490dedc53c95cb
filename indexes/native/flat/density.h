// Rows whose range is so dense that reading every key and value costs less than searching.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"
#include "scanner.h"
#include "thresholds.h"

namespace kvdb::indexes::flat {

// Judged by some chunks evenly spread, the same ones whatever the threads do: what passes the codes
// there is taken to pass everywhere. The rows of a tile share reads, in a search and in reading
// all, so that they are given up together; those that lengths alone answer are not, nor rows that
// see few tokens.
class Density {
  public:
    Density(const Batch& batch, Thresholds& thresholds, int threads, float scale);

    // Drops the rows of a tile that cost too much: the dearest first, as long as the others
    // together cost more than reading all.
    void drop_dense(const Tile& tile, Scanner& scanner, int thread);

    // The log of the sum of exp(scale * q.k) over all that a dropped row sees, never below the
    // truth.
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
    std::vector<std::int64_t> chunks_;                // those scanned
    std::vector<std::vector<ScannedChunk>> scanned_;  // of each thread
    std::vector<float> bounds_;
};

}  // namespace kvdb::indexes::flat
