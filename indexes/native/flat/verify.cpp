#include <atomic>
#include <cstring>

#include "chunk_keys.h"

namespace kvdb::indexes::flat {
namespace {

// Whether a key, centred and rotated, lies within the bounds of its code.
bool fits(const FlatCodes& codes, std::int64_t at, int slot, const float* x, float raw_norm) {
    const int d = codes.head_dim, steps = d / 8;
    const float norm = from_bfloat16(codes.length(at, kNorm)[slot]);
    if (norm == INFINITY) return true;  // always scored
    const float scale = from_bfloat16(codes.length(at, kScale)[slot]);
    const std::int64_t group = at * codes.plane_bytes() +
                               std::int64_t{slot / kKeyGroup} * steps * kKeyGroup * 4 +
                               slot % kKeyGroup * 4;
    const std::uint8_t* signs = codes.sign(at, slot);
    std::uint16_t halves[2];
    std::memcpy(halves, signs + d / 8, sizeof halves);
    double left = 0, left_high = 0, left_signs = 0;
    for (int i = 0; i < d; ++i) {
        const double sign_scale = from_bfloat16(halves[0]);
        const double c = x[i] - (signs[i / 8] >> (i % 8) & 1 ? sign_scale : -sign_scale);
        left_signs += c * c;
        const std::int64_t byte = group + std::int64_t{i / 8} * kKeyGroup * 4 + i % 4;
        const int shift = i % 8 < 4 ? 0 : 4;
        const int high = codes.high[byte] >> shift & 15, low = codes.low[byte] >> shift & 15;
        const double a = x[i] - (16 * high + low - 127.5) * double{scale};
        const double b = x[i] - (16 * high - 120.0) * double{scale};
        left += a * a;
        left_high += b * b;
    }
    return length(x, d) <= norm &&
           std::sqrt(left) <= from_bfloat16(codes.length(at, kError)[slot]) &&
           std::sqrt(left_high) <= from_bfloat16(codes.length(at, kHighError)[slot]) &&
           std::sqrt(left_signs) <= from_bfloat16(halves[1]) && raw_norm <= codes.centre(at)[d];
}

std::int64_t verify_chunk(const Blocks& blocks, const FlatCodes& codes, int kv_head,
                          std::int64_t begin, std::int64_t end) {
    const std::int64_t at = codes.at(begin / kChunk, kv_head);
    std::int64_t wrong = codes.longest[at] < begin || codes.longest[at] >= end;
    each_key(blocks, codes, kv_head, begin, end, [&](int slot, const float* key, float raw_norm) {
        wrong += !fits(codes, at, slot, key, raw_norm);
    });
    return wrong;
}

}  // namespace

std::int64_t verify(const Blocks& blocks, const FlatCodes& codes) {
    std::atomic<std::int64_t> wrong{0};
    each_chunk(blocks, 0, [&](int kv_head, std::int64_t begin, std::int64_t end) {
        wrong += verify_chunk(blocks, codes, kv_head, begin, end);
    });
    return wrong;
}

}  // namespace kvdb::indexes::flat
