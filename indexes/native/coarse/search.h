// Searching pages: representatives first, then the keys of the candidate pages.
#pragma once

#include <cstdint>
#include <vector>

#include "pages.h"
#include "query_rows.h"

namespace kvdb::indexes::coarse {

struct CoarseOptions {
    enum class Retrieval : int { all, range, top_k, top_p };
    Retrieval retrieval;
    double parameter;      // beta in units of q.k, k, or p
    float scale;           // of the softmax
    float margin;          // how much of its reach a page is given
    bool exact;            // with margin 1: overlook nothing, however much is read
    const float* outside;  // [q_heads][n] log of the sum of exp(scale * q.k) elsewhere
    bool tail, tight, give_up;
};

struct CoarseResult {
    RetrievedRows retrieved;
    std::int64_t scanned = 0, nbytes = 0;
    std::vector<float> missed, missed_bound;  // [q_heads * n]
    std::vector<float> tail;                  // [q_heads * n][head_dim] or empty
    std::vector<std::uint8_t> dense;          // [q_heads * n], not 0 where a row is left unanswered
};

CoarseResult search(const Blocks& blocks, const std::vector<Pages>& batches,
                    const QueryRows& queries, const CoarseOptions& options);

}  // namespace kvdb::indexes::coarse
