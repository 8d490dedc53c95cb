// The mass of what was not retrieved, estimated and bounded, and attention over it.
#pragma once

#include <vector>

#include "tile.h"

namespace kvdb::indexes::quantized {

class Rest {
  public:
    explicit Rest(Tile& tile);

    // Sums up over all tokens whose scores are left in the tile.
    void run();

    // Logs of sums of exp(scale * q.k) over these tokens of a row: -inf for none.
    double missed(std::int64_t head, int r) const { return total(head, r, false); }
    // Never below the truth, +inf where nothing is known.
    double bound(std::int64_t head, int r) const { return total(head, r, true); }
    // The attention over them, zero for none.
    void tail(std::int64_t head, int r, float* out) const;

  private:
    // The sums over one chunk, in units of 2^exponent.
    struct ChunkSum {
        double exponent = 0, mass = 0, bound = 0, coded = 0;  // coded: mass of what has codes
    };

    void sum_chunk(std::int64_t head, std::int64_t chunk);
    float least_mass(const Row& row, float reference) const;
    bool sum_again(SumItem& item, int r) const;
    void add_raw_values(std::int64_t head, std::int64_t chunk, int run);
    double total(std::int64_t head, int r, bool bound) const;
    double largest_exponent(std::int64_t head, int r) const;
    std::int64_t at(std::int64_t head, int r) const {
        return (head * tile_.each + r) * tile_.chunks;
    }
    float* values(std::int64_t head, int r, std::int64_t chunk) {
        return values_ + (at(head, r) + chunk) * (dims_ + tile_.codes.head_dim);
    }

    Tile& tile_;
    const int dims_;
    const double factor_;
    std::vector<ChunkSum> sums_;  // [heads][each][chunks]
    float* values_ = nullptr;     // [heads][each][chunks][dims_ as rotated, head_dim as stored]
};

}  // namespace kvdb::indexes::quantized
