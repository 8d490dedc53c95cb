// Segments of tokens cut into pages, and the data of each page. A page belongs to one segment: new
// tokens make new segments.
#pragma once

#include <cstdint>

#include "../blocks.h"
#include "kernels.h"

namespace kvdb::indexes::coarse {

// The data of the pages of one KV head in one segment. "Key" means the key minus `shift`.
struct PageSet {
    std::uint8_t* center;    // codes of the mean key, or of box: largest, then smallest channels
    float* center_scales;    // [pages]
    std::uint8_t* farthest;  // codes of the key farthest from the mean, or null
    float* farthest_scales;
    std::uint8_t* radius;  // codes of the residuals' largest length in each channel block, or null
    float* radius_scales;
    std::int32_t* first;     // [pages + 1] where the members of each page begin
    std::uint16_t* members;  // [tokens] or null: the segment's tokens in order
    BFloat16* values;        // [pages][value_dim] mean values, or null
    float* shift;            // [head_dim]
    float* spread;           // [kChannelBlocks] mean square of a residual's channel
    float* norm;             // [1] of what the codes stand for, the largest

    std::int64_t member(std::int64_t i) const { return members ? members[i] : i; }
};

// Segments of equal length, one behind the other: tokens [begin, begin + segments * tokens).
struct Pages {
    std::int64_t begin, segments, tokens;
    std::int64_t pages;  // of each segment, a multiple of kPageGroup; the last may be empty
    int kv_heads, head_dim, value_dim;
    bool box;
    PageSet all;  // arrays of all segments and KV heads, [segments][kv_heads] first

    int center_dims() const { return box ? 2 * head_dim : head_dim; }
    PageSet of(std::int64_t segment, int kv_head) const {
        const std::int64_t i = segment * kv_heads + kv_head;
        const auto at = [i](auto* array, std::int64_t each) {
            return array ? array + i * each : nullptr;
        };
        return {at(all.center, pages * center_dims()),
                at(all.center_scales, pages),
                at(all.farthest, pages * head_dim),
                at(all.farthest_scales, pages),
                at(all.radius, pages * kChannelBlocks),
                at(all.radius_scales, pages),
                at(all.first, pages + 1),
                at(all.members, tokens),
                at(all.values, pages * value_dim),
                at(all.shift, head_dim),
                at(all.spread, kChannelBlocks),
                at(all.norm, 1)};
    }
};

struct ClusterOptions {
    std::int64_t clusters;  // of each segment
    int iterations;
    float far;  // the share of the centroids that start at the keys farthest from the others
};

// Fills the arrays from the blocks' keys and values. Where there are members, `nearest` says which
// cluster each token is in, [segments][kv_heads][tokens], or, if it is null, k-means does;
// otherwise pages are runs of `page_tokens`.
void build(const Blocks& blocks, const Pages& pages, const ClusterOptions& options,
           std::int64_t page_tokens, const std::uint16_t* nearest);

// Whether the arrays equal those computed anew from the keys and values of these members.
// `page_tokens` as above.
bool verify(const Blocks& blocks, const Pages& pages, std::int64_t page_tokens);

}  // namespace kvdb::indexes::coarse
