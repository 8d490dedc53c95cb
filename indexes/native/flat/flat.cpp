// What searching and the estimate of the missed mass share.
#include "flat.h"

#include <algorithm>
#include <cmath>

#include "../dot.h"
#include "../rounded_query.h"

namespace kvdb::indexes::flat {

FlatTile make_tile(const QueryRows& queries, int head_dim, int kv_head, std::int64_t tile) {
    constexpr float kRounding = 1e-4f;
    FlatTile made{};
    for (int r = 0; r < kTile; ++r) {
        const std::int64_t row = std::min(tile * kTile + r, queries.rows() - 1);
        const float* q = queries.q + (kv_head * queries.rows() + row) * head_dim;
        made.queries[r] = q;
        float rest[kHeadDimMax];
        const RoundedQuery query = round_query(q, head_dim, rest);
        std::copy_n(query.packed, head_dim / 4, made.packed[r]);
        made.step[r] = query.step;
        made.sum[r] = query.sum;
        const float norm = static_cast<float>(length(q, head_dim)) * (1 + kRounding);
        made.norm[r] = norm;
        made.error[r] =
            static_cast<float>(length(rest, head_dim)) * (1 + kRounding) + norm * kRounding / 4;
    }
    return made;
}

FlatScan make_scan(const FlatCodes& codes, const FlatTile& tile, std::int64_t at) {
    FlatScan scan{&tile,
                  codes.head_dim,
                  codes.length(at, kNorm),
                  codes.high + at * codes.plane_bytes(),
                  codes.low + at * codes.plane_bytes(),
                  codes.sign(at, 0),
                  {},
                  {}};
    const float* centre = codes.centre(at);
    flat_kernels().dot(tile, centre, codes.head_dim, scan.base);
    // A float32 sum of head_dim products is off by head_dim * 2^-24 of their lengths at most; there
    // are several such sums, and centring can double a length.
    const float share = 8 * static_cast<float>(codes.head_dim + 16) * 0x1p-24f;
    for (int r = 0; r < kTile; ++r) scan.slack[r] = share * tile.norm[r] * centre[codes.head_dim];
    return scan;
}

std::int64_t visible_bits(const QueryRows& queries, std::int64_t i, std::int64_t chunk,
                          std::uint64_t* bits) {
    std::int64_t count = 0;
    const bool whole = queries.begin[i] <= chunk * kChunk && queries.end[i] >= (chunk + 1) * kChunk;
    if (whole && !queries.hidden) {
        std::fill_n(bits, kChunkWords, ~0ull);
        return kChunk;
    }
    for (int w = 0; w < kChunkWords; ++w) {
        const std::int64_t first = chunk * kChunk + 64 * w;
        const std::int64_t from = std::clamp<std::int64_t>(queries.begin[i] - first, 0, 64);
        const std::int64_t to = std::clamp<std::int64_t>(queries.end[i] - first, 0, 64);
        bits[w] = 0;
        if (from >= to) continue;
        bits[w] = (to == 64 ? ~0ull : (1ull << to) - 1) & ~0ull << from;
        if (queries.hidden) bits[w] &= ~queries.hidden[first / 64];
        count += bits[w] == ~0ull ? 64 : __builtin_popcountll(bits[w]);
    }
    return count;
}

std::int64_t count_visible(const QueryRows& queries, std::int64_t i) {
    const std::int64_t begin = queries.begin[i], end = queries.end[i];
    if (!queries.hidden) return end - begin;
    std::int64_t count = 0;
    std::uint64_t bits[kChunkWords];
    for (std::int64_t c = begin / kChunk; c * kChunk < end; ++c) {
        count += visible_bits(queries, i, c, bits);
    }
    return count;
}

}  // namespace kvdb::indexes::flat
