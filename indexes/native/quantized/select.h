// Which tokens a row retrieves.
#pragma once

#include <vector>

#include "tile.h"

namespace kvdb::indexes::quantized {

class Select {
  public:
    Select(Tile& tile, std::int64_t head, int r);

    // The tokens that may be retrieved, ascending, by the scores that codes give.
    std::vector<std::int32_t> candidates() const;

    // Scores the candidates exactly and keeps, as the row's result, those that the retrieval asks
    // for; their scores in the tile become -inf, and those of the others exact.
    void keep(const std::vector<std::int32_t>& candidates);

  private:
    float reach(std::int64_t run) const {
        return tile_.options.margin > 0 ? tile_.options.margin * slack_[run] : 0;
    }
    float block_reach(std::int64_t block) const;
    void keep_best(std::vector<std::int32_t>& tokens) const;
    void add_all(float least, std::vector<std::int32_t>& tokens) const;
    void add_of_stratum(std::int64_t s, float threshold, std::vector<std::int32_t>& tokens) const;
    float within_threshold() const;
    float rank_threshold() const;
    float share_threshold() const;
    float cut(std::vector<float> scores, double rest) const;
    void fetch_value(std::int32_t token) const;
    float known_mass() const;
    double rest_mass(const std::vector<std::int32_t>& candidates, float top) const;

    Tile& tile_;
    Row& row_;
    const std::int64_t head_;
    const int r_;
    float* scores_;
    const float* largest_;
    const float* slack_;
};

}  // namespace kvdb::indexes::quantized
