#include "insert.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../dot.h"
#include "../each_chunk.h"
#include "../rotate.h"
#include "../score/kernels.h"

namespace kvdb::indexes::quantized {
namespace {

constexpr float kLargest = 1e15f;  // in a run with larger numbers nothing is coded
// More than what float32 loses while a row is centred, rotated and measured, of its length.
constexpr float kRounding = 1e-5f;

float norm(const float* x, int n) {
    return static_cast<float>(length(x, n));
}

float largest(const float* x, std::int64_t n) {
    float most = 0;
    for (std::int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
    return most;
}

// Codes a row, of which what the codes leave stays. reach: raised to the length of what they
// stand for. Returns the scale, bfloat16.
std::uint16_t encode_row(float* x, int n, std::uint8_t* codes, float& reach) {
    const float most = largest(x, n);
    const std::uint16_t bits = most > FLT_MIN * 16 ? bfloat16_up(most / kCodeMiddle) : 0;
    const float scale = from_bfloat16(bits), inverse = scale > 0 ? 1 / scale : 0;
    double sum = 0;
    for (int i = 0; i < n; ++i) {
        const float code = std::clamp(std::floor(x[i] * inverse + kCodeMiddle + 0.5f), 0.0f, 15.0f);
        codes[i] = static_cast<std::uint8_t>(code);
        const float stands = (code - kCodeMiddle) * scale;
        sum += double{stands} * stands;
        x[i] -= stands;
    }
    reach = std::max(reach, static_cast<float>(std::sqrt(sum)));
    return bits;
}

void store_key(const Codes& chunk, int slot, const std::uint8_t* codes) {
    const int d = chunk.head_dim;
    std::uint8_t* to = chunk.keys + slot / kRun * (d * kRun / 2) + slot % kRun * 4;
    for (int s = 0; s < d / 8; ++s, to += 4 * kRun) {
        for (int j = 0; j < 4; ++j) {
            to[j] = static_cast<std::uint8_t>(codes[8 * s + j] | codes[8 * s + 4 + j] << 4);
        }
    }
}

void store_value(const Codes& chunk, int slot, const std::uint8_t* codes) {
    const int d = chunk.head_dim, dims = Codes::value_dims(d), unit = slot % kUnit;
    std::uint8_t* run = chunk.values + slot / kRun * (kRun * dims / 2);
    for (int i = 0; i < d; ++i) {
        const int slice = i / kSliceDims * kSliceDims, width = std::min(kSliceDims, dims - slice);
        std::uint8_t& to =
            run[slice * kRun / 2 + slot % kRun / kUnit * width * 4 + (i - slice) * 4 + unit % 4];
        to |= static_cast<std::uint8_t>(codes[i] << (unit < 4 ? 0 : 4));
    }
}

// The mean of rows, zero where they are too large for one.
void mean(const float* rows, std::int64_t count, int d, float* out) {
    std::vector<double> sums(d);
    for (std::int64_t t = 0; t < count; ++t) {
        for (int i = 0; i < d; ++i) sums[i] += rows[t * d + i];
    }
    bool usable = true;
    for (int i = 0; i < d; ++i) {
        out[i] = static_cast<float>(sums[i] / double(count));
        usable = usable && std::fabs(out[i]) <= kLargest;
    }
    if (!usable) std::fill_n(out, d, 0.0f);
}

class ChunkEncoder {
  public:
    ChunkEncoder(const Blocks& blocks, int kv_head, std::int64_t begin, std::int64_t end)
        : d_(blocks.geometry.head_dim), count_(end - begin), keys_(count_ * d_), values_(keys_) {
        const auto dtype = static_cast<int>(blocks.geometry.dtype);
        score_kernels().widen_keys[dtype]({blocks, kv_head, begin, count_, keys_.data()});
        score_kernels().widen_values[dtype]({blocks, kv_head, begin, count_, values_.data()});
    }

    // Into a chunk of zeros.
    void encode(const Codes& chunk) {
        mean(keys_.data(), count_, d_, chunk.centres);
        mean(values_.data(), count_, d_, chunk.centres + d_);
        for (std::int64_t t = 0; t < count_; t += kRun) encode_run(chunk, t);
    }

  private:
    void encode_run(const Codes& chunk, std::int64_t first) {
        const std::int64_t end = std::min(first + kRun, count_);
        float& error = chunk.bounds[first / kRun];
        float& reach = chunk.bounds[kRuns + first / kRun];
        const std::int64_t at = first * d_, numbers = (end - first) * d_;
        if (!(largest(keys_.data() + at, numbers) <= kLargest) ||
            !(largest(values_.data() + at, numbers) <= kLargest)) {
            error = std::numeric_limits<float>::infinity();
            for (std::int64_t t = first; t < end; ++t) {
                reach = std::max(reach, norm(keys_.data() + t * d_, d_) * (1 + kRounding));
            }
            return;
        }
        std::uint8_t codes[kHeadDimMax];
        for (std::int64_t t = first; t < end; ++t) {
            const int slot = static_cast<int>(t);
            float* key = keys_.data() + t * d_;
            const float raw = norm(key, d_);
            for (int i = 0; i < d_; ++i) key[i] -= chunk.centres[i];
            rotate(key, d_);
            chunk.scales[slot] = encode_row(key, d_, codes, reach);
            store_key(chunk, slot, codes);
            const float rounding = kRounding * (raw + norm(chunk.centres, d_)) + FLT_MIN;
            error = std::max(error, norm(key, d_) * (1 + kRounding) + rounding);
            float* value = values_.data() + t * d_;
            for (int i = 0; i < d_; ++i) value[i] -= chunk.centres[d_ + i];
            rotate(value, d_);
            float ignored = 0;
            chunk.scales[kChunk + slot] = encode_row(value, d_, codes, ignored);
            store_value(chunk, slot, codes);
        }
        reach *= 1 + kRounding;
    }

    int d_;
    std::int64_t count_;
    std::vector<float> keys_, values_;
};

// One chunk of one KV head, and the memory that holds it.
struct Chunk {
    explicit Chunk(int d)
        : centres(2 * d),
          scales(2 * kChunk),
          keys(kChunk * d / 2),
          values(kChunk * Codes::value_dims(d) / 2),
          bounds(2 * kRuns),
          codes{1, d, centres.data(), scales.data(), keys.data(), values.data(), bounds.data()} {}

    std::vector<float> centres;
    std::vector<std::uint16_t> scales;
    std::vector<std::uint8_t> keys, values;
    std::vector<float> bounds;
    Codes codes;
};

// body(array of a, array of b, bytes) for each array of two chunks.
template <class Body>
void each_array(const Codes& a, const Codes& b, Body&& body) {
    body(a.centres, b.centres, 2 * a.head_dim * sizeof(float));
    body(a.scales, b.scales, 2 * kChunk * sizeof(std::uint16_t));
    body(a.keys, b.keys, std::size_t(a.key_bytes()));
    body(a.values, b.values, std::size_t(a.value_bytes()));
    body(a.bounds, b.bounds, 2 * kRuns * sizeof(float));
}

// body(chunk in the arrays, the chunk as it should be) for each chunk from the one on that holds
// token `from`.
template <class Body>
void each_pair(const Blocks& blocks, const Codes& codes, std::int64_t from, Body&& body) {
    each_chunk(blocks, from / kChunk * kChunk, [&](int head, std::int64_t begin, std::int64_t end) {
        Chunk made(codes.head_dim);
        ChunkEncoder(blocks, head, begin, end).encode(made.codes);
        body(codes.at(begin / kChunk, head), made.codes);
    });
}

}  // namespace

void insert(const Blocks& blocks, const Codes& codes, std::int64_t coded) {
    each_pair(blocks, codes, coded, [](const Codes& to, const Codes& made) {
        each_array(to, made, [](void* a, const void* b, std::size_t n) { std::memcpy(a, b, n); });
    });
}

std::int64_t verify(const Blocks& blocks, const Codes& codes) {
    std::atomic<std::int64_t> wrong{0};
    each_pair(blocks, codes, 0, [&](const Codes& kept, const Codes& made) {
        bool same = true;
        each_array(kept, made, [&](const void* a, const void* b, std::size_t n) {
            same = same && std::memcmp(a, b, n) == 0;
        });
        wrong += !same;
    });
    return wrong;
}

}  // namespace kvdb::indexes::quantized
