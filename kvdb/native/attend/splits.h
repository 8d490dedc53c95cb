// Runs of blocks, cut into parts for threads.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/kernels.h"

namespace kvdb {

inline constexpr std::int64_t kItemsPerThread = 8;  // so that a thread that is held up costs little
inline constexpr std::int64_t kSplitTokensMin = 256;  // a split costs a state and a merge

// Where a part of the run begins, always at the first token of a block.
struct Split {
    std::int64_t block;
    std::int64_t token;
};

// Throws std::invalid_argument for a block that is not stored as it came.
void check_raw(const Run& run);

// Throws std::invalid_argument for counts that make no sense.
std::int64_t count_tokens(const Geometry& geometry, const Run& run);

// Up to where no token is seen that lies before `begin`.
Split skip_unseen(const Run& run, Split from, std::int64_t blocks, std::int64_t begin);

// `parts` parts at most, of about as many tokens each, and where the last one ends.
std::vector<Split> split_tokens(const Run& run, const Split& from, std::int64_t tokens,
                                std::int64_t parts);

}  // namespace kvdb
