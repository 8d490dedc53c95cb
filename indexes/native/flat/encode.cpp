#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>

#include "flat.h"
#include "rotate.h"
#include "thread_pool.h"

namespace kvdb::indexes {
namespace {

constexpr int kPiece = 64;           // keys widened at a time
constexpr float kLengthMax = 1e15f;  // beyond it a key is kept without a code
// More than what float32 loses while a key is centred, rotated and measured, of its length.
constexpr float kRounding = 1e-4f;

struct Coded {
    float norm, scale, high_error, error, sign_scale, sign_error;
    std::uint8_t signs[kHeadDimMax / 8];
    std::uint8_t codes[kHeadDimMax];
};

double length(const float* x, int n) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += double{x[i]} * x[i];
    return std::sqrt(sum);
}

// Codes a key, centred and rotated. `scale` is rounded up first, so that a code says what it says.
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

void widen(const Blocks& blocks, int kv_head, std::int64_t begin, std::int64_t count, float* out) {
    const auto kernel = score_kernels().widen_keys[static_cast<int>(blocks.geometry.dtype)];
    kernel({blocks, kv_head, begin, count, out});
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
    for (int i = 0; i < d; ++i) {
        centre[i] = static_cast<float>(sums[i] / static_cast<double>(end - begin));
        usable = usable && std::fabs(centre[i]) <= kLengthMax / kHeadDimMax;
    }
    if (!usable) std::fill(centre, centre + d, 0.0f);
    centre[d] = static_cast<float>(length(centre, d));
}

void encode_chunk(const Blocks& blocks, const FlatCodes& codes, int kv_head, std::int64_t begin,
                  std::int64_t end) {
    const int d = codes.head_dim;
    const std::int64_t at = codes.at(begin / kChunk, kv_head);
    float* centre = codes.centre(at);
    if (begin % kChunk == 0) {
        make_centre(blocks, kv_head, begin, end, centre);
        codes.longest[at] = static_cast<std::int32_t>(begin);
    }
    float keys[kPiece * kHeadDimMax];
    Coded coded;
    for (std::int64_t t = begin; t < end; t += kPiece) {
        const std::int64_t count = std::min<std::int64_t>(kPiece, end - t);
        widen(blocks, kv_head, t, count, keys);
        for (std::int64_t j = 0; j < count; ++j) {
            float* key = keys + j * d;
            const float raw_norm = static_cast<float>(length(key, d));
            for (int i = 0; i < d; ++i) key[i] -= centre[i];
            rotate(key, d);
            encode_key(key, d, raw_norm, coded);
            if (coded.norm < INFINITY) centre[d] = std::max(centre[d], raw_norm);
            store(codes, at, static_cast<int>((t + j) % kChunk), coded);
            const std::uint16_t* norms = codes.length(at, kNorm);
            if (norms[(t + j) % kChunk] > norms[codes.longest[at] % kChunk]) {
                codes.longest[at] = static_cast<std::int32_t>(t + j);
            }
        }
    }
}

// Whether a key, centred and rotated, is as its code says.
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

std::int64_t violations_in_chunk(const Blocks& blocks, const FlatCodes& codes, int kv_head,
                                 std::int64_t begin, std::int64_t end) {
    const int d = codes.head_dim;
    const std::int64_t at = codes.at(begin / kChunk, kv_head);
    const std::int32_t longest = codes.longest[at];
    std::int64_t wrong = longest < begin || longest >= end;
    float keys[kPiece * kHeadDimMax];
    for (std::int64_t t = begin; t < end; t += kPiece) {
        const std::int64_t count = std::min<std::int64_t>(kPiece, end - t);
        widen(blocks, kv_head, t, count, keys);
        for (std::int64_t j = 0; j < count; ++j) {
            float* key = keys + j * d;
            const float raw_norm = static_cast<float>(length(key, d));
            for (int i = 0; i < d; ++i) key[i] -= codes.centre(at)[i];
            rotate(key, d);
            wrong += !fits(codes, at, static_cast<int>((t + j) % kChunk), key, raw_norm);
        }
    }
    return wrong;
}

template <class Body>
void over_chunks(const Blocks& blocks, std::int64_t from, Body&& body) {
    const std::int64_t first = from / kChunk;
    const std::int64_t chunks = (blocks.tokens + kChunk - 1) / kChunk - first;
    if (chunks <= 0) return;
    ThreadPool& pool = ThreadPool::instance();
    const int heads = blocks.geometry.kv_heads;
    const int threads = (blocks.tokens - from) * heads < 256 ? 1 : pool.threads();
    pool.run(chunks * heads, threads, [&](std::int64_t item, int) {
        const std::int64_t chunk = first + item / heads;
        body(static_cast<int>(item % heads), std::max(from, chunk * kChunk),
             std::min(blocks.tokens, (chunk + 1) * kChunk));
    });
}

}  // namespace

void flat_encode(const Blocks& blocks, const FlatCodes& codes, std::int64_t coded) {
    over_chunks(blocks, coded, [&](int kv_head, std::int64_t begin, std::int64_t end) {
        encode_chunk(blocks, codes, kv_head, begin, end);
    });
}

std::int64_t flat_violations(const Blocks& blocks, const FlatCodes& codes) {
    std::atomic<std::int64_t> wrong{0};
    over_chunks(blocks, 0, [&](int kv_head, std::int64_t begin, std::int64_t end) {
        wrong += violations_in_chunk(blocks, codes, kv_head, begin, end);
    });
    return wrong;
}

}  // namespace kvdb::indexes
