// Searches of the quantized index.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "query_rows.h"

namespace kvdb::indexes::quantized {

struct Options {
    enum class Retrieval { everything, range, top_k, top_p };
    Retrieval retrieval;
    double parameter;      // beta, k or p
    float scale;           // of the softmax
    float margin;          // the share of the bound on a code's error that a token is given
    const float* outside;  // [q_heads][n] log of the mass elsewhere
    bool tail, tight, give_up;
};

// missed and bound are logs of sums of exp(scale * q.k). tail: [q_heads * n][head_dim], or empty.
struct Result {
    RetrievedRows retrieved;
    std::vector<float> missed, bound, tail;
    std::vector<std::uint8_t> dense;
    std::int64_t scanned = 0, nbytes = 0;
};

Result search(const Blocks& blocks, const Codes& codes, const QueryRows& queries,
              const Options& options);

}  // namespace kvdb::indexes::quantized
