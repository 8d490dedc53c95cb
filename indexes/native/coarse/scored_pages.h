// The tokens of a KV head that were scored exactly for thresholds, so that reading does not score
// them again.
#pragma once

#include <cstdint>
#include <vector>

namespace kvdb::indexes::coarse {

struct ScoredPages {
    std::vector<std::int32_t> begin;   // [pages of all segments] of tokens, -1 for other pages
    std::vector<std::int32_t> tokens;  // page after page
    std::vector<std::int32_t> count;   // [pages of all segments]
    std::vector<float> scores;         // [rows][tokens], those that a row does not see included

    bool has(std::int64_t page) const { return !begin.empty() && begin[page] >= 0; }
    const float* row(int r) const { return scores.data() + std::int64_t(tokens.size()) * r; }
};

}  // namespace kvdb::indexes::coarse
