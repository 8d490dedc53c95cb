#include "splits.h"

#include <stdexcept>
#include <string>

namespace kvdb {

void check_raw(const Run& run) {
    for (std::int64_t b = 0; b < run.blocks; ++b) {
        if (run.table[b] & kFormatMask) {
            throw std::invalid_argument("table[" + std::to_string(b) + "] is " +
                                        std::to_string(run.table[b]) +
                                        "; expected the address of a block as it came");
        }
    }
}

std::int64_t count_tokens(const Geometry& geometry, const Run& run) {
    std::int64_t tokens = 0;
    for (std::int64_t b = 0; b < run.blocks; ++b) {
        const std::int32_t count = run.counts[b];
        if (count < 0 || count > geometry.block_size) {
            throw std::invalid_argument("counts[" + std::to_string(b) + "] is " +
                                        std::to_string(count) +
                                        "; a block of this geometry holds 0 to " +
                                        std::to_string(geometry.block_size) + " tokens");
        }
        tokens += count;
    }
    return tokens;
}

Split skip_unseen(const Run& run, Split from, std::int64_t blocks, std::int64_t begin) {
    while (from.block < blocks && from.token + run.counts[from.block] <= begin) {
        from.token += run.counts[from.block++];
    }
    return from;
}

std::vector<Split> split_tokens(const Run& run, const Split& from, std::int64_t tokens,
                                std::int64_t parts) {
    std::vector<Split> splits{from};
    std::int64_t token = from.token;
    const std::int64_t seen = tokens - from.token;
    for (std::int64_t b = from.block; b < run.blocks; ++b) {
        const auto next = static_cast<std::int64_t>(splits.size());
        if (next < parts && token >= from.token + seen * next / parts &&
            token > splits.back().token) {
            splits.push_back({b, token});
        }
        token += run.counts[b];
    }
    splits.push_back({run.blocks, tokens});
    return splits;
}

}  // namespace kvdb
