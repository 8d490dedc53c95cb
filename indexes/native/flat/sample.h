// A few tokens of every head, scored exactly: they give the first thresholds, and estimates over
// all tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"
#include "scanner.h"
#include "thresholds.h"

namespace kvdb::indexes::flat {

class Sample {
  public:
    explicit Sample(const Batch& batch);

    // Tokens evenly spread, and, for thresholds, the longest keys of some chunks.
    void score_sample(const Tile& tile, Scanner& scanner, Thresholds& thresholds);

    // The log of the mean of exp(scale * q.k) over the drawn tokens that a row sees and whose q.k
    // is below `least`; that of `least` itself where there are none.
    double log_mean(std::int64_t row, double scale, float least) const;

  private:
    const Batch& batch_;
    std::vector<std::int32_t> tokens_;  // evenly spread
    std::vector<float> scores_;         // [heads][rows] of them
};

}  // namespace kvdb::indexes::flat
