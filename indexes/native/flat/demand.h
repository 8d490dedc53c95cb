// Which rows want so much that reading every key and value costs less than searching.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"
#include "scanner.h"
#include "thresholds.h"

namespace kvdb::indexes {

// Judged by some chunks evenly spread, the same ones whatever the threads do: what passes the codes
// there is taken to pass everywhere. The rows of a tile share reads, in a search and in reading
// all, so that they are given up together; those that lengths alone answer are not, nor rows that
// see few tokens.
class Demand {
  public:
    Demand(const Batch& batch, Thresholds& thresholds, int threads, float scale);

    // Drops the rows of a tile that cost too much: the dearest first, as long as the others
    // together cost more than reading all.
    void judge(const Tile& tile, Scanner& scanner, int thread);

    // The log of the sum of exp(scale * q.k) over all that a dropped row sees, never below the
    // truth.
    float bound(std::int64_t row) const { return bounds_[row]; }

  private:
    struct Looked {  // of a chunk, keys that some row may want
        std::uint64_t bits[kChunkWords];
        FlatPrune prune;
    };
    struct Shares {  // of the tokens that a row sees, those whose keys are read
        double of[kTile] = {};
    };

    std::int64_t query(const Tile& tile, int r) const { return batch_.query_of(tile.row(r)); }
    bool any_hungry(const Tile& tile, Scanner& scanner, bool* hungry) const;
    Shares shares(const Tile& tile, Scanner& scanner, int thread);
    bool look(const Tile& tile, Scanner& scanner, std::vector<Looked>& looked) const;
    double passing(const Tile& tile, int r, const std::vector<Looked>& looked) const;
    void bound_all(const Tile& tile);

    const Batch& batch_;
    Thresholds& thresholds_;
    const float scale_;
    std::vector<std::int64_t> chunks_;         // those looked at
    std::vector<std::vector<Looked>> looked_;  // of each thread
    std::vector<float> bounds_;
};

}  // namespace kvdb::indexes
