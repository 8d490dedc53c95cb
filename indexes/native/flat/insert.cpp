#include <cfloat>
#include <cstring>

#include "chunk_keys.h"

namespace kvdb::indexes::flat {
namespace {

constexpr float kLengthMax = 1e15f;  // beyond it a key is kept without a code
// More than the error of float32 when a key is centred, rotated and measured, as a share of its
// length.
constexpr float kRounding = 1e-4f;

struct Coded {
    float norm, scale, high_error, error, sign_scale, sign_error;
    std::uint8_t signs[kHeadDimMax / 8];
    std::uint8_t codes[kHeadDimMax];
};

// Codes a key, centred and rotated. `scale` is rounded to bfloat16 first, because that is the scale
// with which the code is read.
void encode_key(const float* x, int head_dim, float raw_norm, Coded& key) {
    float largest = 0;
    for (int i = 0; i < head_dim; ++i) largest = std::max(largest, std::fabs(x[i]));
    const float norm = static_cast<float>(length(x, head_dim));
    if (!(norm <= kLengthMax) || !(raw_norm <= kLengthMax)) {
        key = {INFINITY, 0, INFINITY, INFINITY, 0, INFINITY, {}, {}};
        return;
    }
    const float scale = from_bfloat16(bfloat16_up(largest / 127.5f));
    const float inverse = scale > FLT_MIN ? 1 / scale : 0;
    float left = 0, left_high = 0;
    for (int i = 0; i < head_dim; ++i) {
        const float code =
            std::min(255.0f, std::max(0.0f, std::floor(x[i] * inverse + 127.5f + 0.5f)));
        key.codes[i] = static_cast<std::uint8_t>(code);
        const float high = static_cast<float>(key.codes[i] >> 4) * 16 - 120;
        const float a = x[i] - (code - 127.5f) * scale, b = x[i] - high * scale;
        left += a * a;
        left_high += b * b;
    }
    float sum = 0, left_signs = 0;
    for (int i = 0; i < head_dim; ++i) sum += std::fabs(x[i]);
    key.sign_scale = from_bfloat16(bfloat16_up(sum / static_cast<float>(head_dim)));
    for (int i = 0; i < head_dim; i += 8) {
        key.signs[i / 8] = 0;
        for (int j = 0; j < 8; ++j) {
            const float a = std::fabs(x[i + j]) - key.sign_scale;
            left_signs += a * a;
            key.signs[i / 8] |= static_cast<std::uint8_t>((x[i + j] >= 0) << j);
        }
    }
    const float rounding = kRounding * (norm + raw_norm) + FLT_MIN;
    key.norm = norm * (1 + kRounding) + rounding;
    key.scale = scale;
    key.high_error = std::sqrt(left_high) * (1 + kRounding) + rounding;
    key.error = std::sqrt(left) * (1 + kRounding) + rounding;
    key.sign_error = std::sqrt(left_signs) * (1 + kRounding) + rounding;
}

void store(const FlatCodes& codes, std::int64_t at, int slot, const Coded& key) {
    codes.length(at, kNorm)[slot] = bfloat16_up(key.norm);
    codes.length(at, kScale)[slot] = bfloat16_up(key.scale);
    codes.length(at, kHighError)[slot] = bfloat16_up(key.high_error);
    codes.length(at, kError)[slot] = bfloat16_up(key.error);
    const std::uint16_t halves[2] = {bfloat16_up(key.sign_scale), bfloat16_up(key.sign_error)};
    std::copy_n(key.signs, codes.head_dim / 8, codes.sign(at, slot));
    std::memcpy(codes.sign(at, slot) + codes.head_dim / 8, halves, sizeof halves);
    const int steps = codes.head_dim / 8;
    const std::int64_t group = at * codes.plane_bytes() +
                               std::int64_t{slot / kKeyGroup} * steps * kKeyGroup * 4 +
                               slot % kKeyGroup * 4;
    for (int s = 0; s < steps; ++s) {
        for (int j = 0; j < 4; ++j) {
            const std::uint8_t first = key.codes[8 * s + j], second = key.codes[8 * s + 4 + j];
            const std::int64_t to = group + std::int64_t{s} * kKeyGroup * 4 + j;
            codes.high[to] = static_cast<std::uint8_t>(first >> 4 | (second & 0xf0));
            codes.low[to] = static_cast<std::uint8_t>((first & 15) | (second & 15) << 4);
        }
    }
}

void make_centre(const Blocks& blocks, int kv_head, std::int64_t begin, std::int64_t end,
                 float* centre) {
    const int d = blocks.geometry.head_dim;
    float keys[kPiece * kHeadDimMax];
    double sums[kHeadDimMax] = {};
    for (std::int64_t t = begin; t < end; t += kPiece) {
        const std::int64_t count = std::min<std::int64_t>(kPiece, end - t);
        widen(blocks, kv_head, t, count, keys);
        for (std::int64_t j = 0; j < count; ++j) {
            for (int i = 0; i < d; ++i) sums[i] += keys[j * d + i];
        }
    }
    bool usable = true;
    // Of so many dimensions, or more, its length is a number that can be coded.
    constexpr float most = kLengthMax / 256;
    for (int i = 0; i < d; ++i) {
        centre[i] = static_cast<float>(sums[i] / static_cast<double>(end - begin));
        usable = usable && std::fabs(centre[i]) <= most;
    }
    if (!usable) std::fill(centre, centre + d, 0.0f);
    centre[d] = static_cast<float>(length(centre, d));
}

void insert_chunk(const Blocks& blocks, const FlatCodes& codes, int kv_head, std::int64_t begin,
                  std::int64_t end) {
    const std::int64_t at = codes.at(begin / kChunk, kv_head), first = begin / kChunk * kChunk;
    float* centre = codes.centre(at);
    if (begin == first) {
        make_centre(blocks, kv_head, begin, end, centre);
        codes.longest[at] = static_cast<std::int32_t>(begin);
    }
    const std::uint16_t* norms = codes.length(at, kNorm);
    Coded coded;
    each_key(blocks, codes, kv_head, begin, end, [&](int slot, const float* key, float raw_norm) {
        encode_key(key, codes.head_dim, raw_norm, coded);
        if (coded.norm < INFINITY)
            centre[codes.head_dim] = std::max(centre[codes.head_dim], raw_norm);
        store(codes, at, slot, coded);
        if (norms[slot] > norms[codes.longest[at] % kChunk]) {
            codes.longest[at] = static_cast<std::int32_t>(first + slot);
        }
    });
}

}  // namespace

void insert(const Blocks& blocks, const FlatCodes& codes, std::int64_t coded) {
    each_chunk(blocks, coded, [&](int kv_head, std::int64_t begin, std::int64_t end) {
        insert_chunk(blocks, codes, kv_head, begin, end);
    });
}

}  // namespace kvdb::indexes::flat
