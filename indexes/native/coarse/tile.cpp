#include "tile.h"

#include <algorithm>
#include <cmath>

namespace kvdb::indexes::coarse {
namespace {

constexpr float kSmallest = 1e-30f;  // below it a reciprocal may overflow

// Rounds to bytes in steps of a common scale; returns the scale.
float to_bytes(const float* x, int n, std::int8_t* bytes) {
    float most = 0;
    for (int i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
    if (!(most > kSmallest)) {
        std::fill_n(bytes, n, std::int8_t{0});
        return 0;
    }
    const float scale = most / 127, inverse = 1 / scale;
    for (int i = 0; i < n; ++i) {
        bytes[i] =
            static_cast<std::int8_t>(std::clamp(std::nearbyintf(x[i] * inverse), -127.0f, 127.0f));
    }
    return scale;
}

}  // namespace

void CodedQuery::code(int d, bool box) {
    std::vector<float> wide(q, q + d);
    if (box) {  // meets the largest channels where it is positive, the smallest where negative
        wide.resize(2 * d);
        for (int i = 0; i < d; ++i) {
            wide[i] = std::max(q[i], 0.0f);
            wide[d + i] = std::min(q[i], 0.0f);
        }
    }
    bytes.resize(wide.size());
    const float scale = to_bytes(wide.data(), static_cast<int>(wide.size()), bytes.data());
    double lost = 0, length_squared = 0;
    std::int32_t sum = 0;
    for (std::size_t i = 0; i < wide.size(); ++i) {
        const double miss = double{wide[i]} - double{scale} * bytes[i];
        lost += miss * miss;
        length_squared += double{wide[i]} * wide[i];
        sum += bytes[i];
    }
    center = {bytes.data(), -static_cast<std::int32_t>(kCodeZero) * sum, scale};
    error = static_cast<float>(std::sqrt(lost));
    norm = static_cast<float>(std::sqrt(length_squared));

    float most = 0, lengths[kChannelBlocks];
    for (int b = 0; b < kChannelBlocks; ++b) {
        double square = 0;
        for (int i = b * d / kChannelBlocks; i < (b + 1) * d / kChannelBlocks; ++i) {
            square += double{q[i]} * q[i];
        }
        blocks[b] = static_cast<float>(square);
        lengths[b] = static_cast<float>(std::sqrt(square));
        most = std::max(most, lengths[b]);
    }
    const float step = std::max(most / 126, kSmallest);  // rounded up, so that it bounds
    for (int b = 0; b < kChannelBlocks; ++b) {
        radius[b] = static_cast<std::int8_t>(std::ceil(lengths[b] / step));
    }
    length = {radius, 0, step * 1.00001f};
}

Tile::Tile(const std::vector<Segment>& segments, const QueryRows& from, const Geometry& geometry,
           std::int64_t first, std::int64_t count, bool box, bool priorities)
    : i0(first), n(count), rows(static_cast<int>(from.group * count)) {
    const int kv_heads = geometry.kv_heads;
    queries.resize(static_cast<std::size_t>(kv_heads) * rows);
    for (int h = 0; h < kv_heads; ++h) {
        for (int r = 0; r < rows; ++r) {
            CodedQuery& query = queries[h * rows + r];
            query.i = i0 + r % n;
            query.row = (std::int64_t{h} * from.group + r / n) * from.n + query.i;
            query.q = from.q + query.row * geometry.head_dim;
            if (from.is_active(h)) query.code(geometry.head_dim, box);
        }
    }
    for (const Segment& segment : segments) pages_ += segment.pages->pages;
    const std::int64_t each = pages_ * kv_heads;
    const std::int64_t floats =
        each * (n + rows * (2 + (priorities ? 1 : 0))) + each / kPageGroup * rows;
    auto* memory =
        reinterpret_cast<float*>(Workspace::of_this_thread().reserve(floats * sizeof(float)));
    middle_ = memory;
    reach_ = middle_ + each * rows;
    priority_ = priorities ? reach_ + each * rows : nullptr;
    counts_ = reach_ + each * rows * (priorities ? 2 : 1);
    best_ = counts_ + each * n;
}

Tile::View Tile::view(const Segment& segment, int kv_head) const {
    const std::int64_t pages = segment.pages->pages;
    const std::int64_t at = kv_head * pages_ + segment.page_offset;
    return {pages,
            counts_ + at * n,
            middle_ + at * rows,
            reach_ + at * rows,
            priority_ ? priority_ + at * rows : nullptr,
            best_ + at / kPageGroup * rows};
}

Visibility::Visibility(const QueryRows& queries, const Segment& segment)
    : queries_(queries), segment_(segment), tokens_(segment.end - segment.begin), hidden_(false) {
    if (!queries.hidden) return;
    std::int64_t t = segment.begin;
    for (; t < segment.end && t % 64; ++t) hidden_ |= queries.is_hidden(t);
    for (; t + 64 <= segment.end; t += 64) hidden_ |= queries.hidden[t / 64] != 0;
    for (; t < segment.end; ++t) hidden_ |= queries.is_hidden(t);
}

std::pair<std::int64_t, std::int64_t> Visibility::span(std::int64_t i, std::int64_t n) const {
    std::int64_t from = tokens_, to = 0;
    for (const std::int64_t stop = i + n; i < stop; ++i) {
        if (none(i)) continue;
        from = std::min(from, begin(i));
        to = std::max(to, end(i));
    }
    return {from, to};
}

void Visibility::count(std::int64_t i, const PageSet& set, std::int64_t pages,
                       float* counts) const {
    if (whole(i)) {
        for (std::int64_t p = 0; p < pages; ++p) {
            counts[p] = static_cast<float>(set.first[p + 1] - set.first[p]);
        }
        return;
    }
    const std::int64_t begin = this->begin(i), end = this->end(i);
    for (std::int64_t p = 0; p < pages; ++p) {
        const std::int64_t from = set.first[p], to = set.first[p + 1];
        std::int64_t seen = to - from;
        const bool inside = seen == 0 || (set.member(from) >= begin && set.member(to - 1) < end);
        if (hidden_ || !inside) {
            seen = 0;
            for (std::int64_t m = from; m < to; ++m) seen += sees(i, set.member(m));
        }
        counts[p] = static_cast<float>(seen);
    }
}

}  // namespace kvdb::indexes::coarse
