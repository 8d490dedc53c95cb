// Which rows want so much that reading every key and value costs less than searching.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"
#include "scanner.h"
#include "thresholds.h"

namespace kvdb::indexes {

// Judged by some chunks evenly spread, the same ones whatever the threads do: what passes the codes
// there is taken to pass everywhere. Rows that see few tokens are never given up.
class Demand {
  public:
    Demand(const Batch& batch, Thresholds& thresholds, int threads, float scale);

    // Drops the rows of a tile that cost too much: the dearest first, as long as the others together
    // cost more than reading all.
    void judge(const Tile& tile, Scanner& scanner, int thread);

    // The log of the sum of exp(scale * q.k) over all that a dropped row sees, never below the truth.
    float bound(std::int64_t row) const { return bounds_[row]; }

  private:
    struct Looked {  // a chunk and its keys that some row may want
        std::int64_t chunk;
        std::uint64_t bits[kChunkWords];
        FlatPrune prune;
    };
    struct Shares {  // of the tokens that a row sees, those that pass; 0 where it is to be answered
        double of[kTile] = {};
    };

    bool any_hungry(const Tile& tile, Scanner& scanner, bool* hungry) const;
    Shares found(const Tile& tile, Scanner& scanner, int thread);
    std::int64_t passing(const Tile& tile, int r, const Looked& looked,
                         const std::uint64_t* bits) const;
    void bound_all(const Tile& tile);

    const Batch& batch_;
    Thresholds& thresholds_;
    const float scale_;
    std::vector<std::int64_t> chunks_;           // those looked at
    std::vector<std::vector<Looked>> looked_;  // of each thread
    std::vector<float> bounds_;
};

}  // namespace kvdb::indexes
