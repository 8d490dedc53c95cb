#include "representatives.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../score/kernels.h"

namespace kvdb::indexes::coarse {
namespace {

// Where the code of `dim` of a page lies among codes of `dims` dimensions.
std::int64_t code_at(std::int64_t page, int dim, int dims) {
    return page / kPageGroup * kPageGroup * dims + dim / 4 * (4 * kPageGroup) +
           page % kPageGroup * 4 + dim % 4;
}

// If a key is so large that a float cannot hold its difference to the mean, its code is NaN. Any
// byte will do then, because its scale is infinite.
std::uint8_t to_byte(float code) {
    return static_cast<std::uint8_t>(code == code ? code : 255.0f);
}

float largest(const float* x, int n) {
    float most = 0;
    for (int i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
    return most;
}

// Codes x by rounding to nearest; x becomes the values that the codes stand for.
void encode(float* x, int dims, std::int64_t page, std::uint8_t* codes, float* scales) {
    const float scale = largest(x, dims) / 127;
    const float inverse = scale > 0 ? 1 / scale : 0;
    scales[page] = scale;
    for (int i = 0; i < dims; ++i) {
        const float code = std::clamp(std::nearbyintf(x[i] * inverse), -127.0f, 127.0f);
        codes[code_at(page, i, dims)] = to_byte(code + kCodeZero);
        x[i] = code * scale;
    }
}

// Codes a box so that it still holds all its keys: the largest channels are rounded up, the
// smallest down.
void encode_box(float* box, int head_dim, std::int64_t page, std::uint8_t* codes, float* scales) {
    const float scale = largest(box, 2 * head_dim) / 126;
    const float inverse = scale > 0 ? 1 / scale : 0;
    scales[page] = scale;
    for (int i = 0; i < 2 * head_dim; ++i) {
        const bool up = i < head_dim;
        float code = up ? std::ceil(box[i] * inverse) : std::floor(box[i] * inverse);
        if (up && code * scale < box[i]) ++code;
        if (!up && code * scale > box[i]) --code;
        code = std::clamp(code, -127.0f, 127.0f);
        codes[code_at(page, i, 2 * head_dim)] = to_byte(code + kCodeZero);
        box[i] = code * scale;
    }
}

void encode_radius(const float* radius, std::int64_t page, std::uint8_t* codes, float* scales) {
    const float scale = largest(radius, kChannelBlocks) / 254;
    scales[page] = scale;
    for (int b = 0; b < kChannelBlocks; ++b) {
        float code = scale > 0 ? std::ceil(radius[b] / scale) : 0;
        if (code * scale < radius[b]) ++code;
        codes[code_at(page, b, kChannelBlocks)] = to_byte(std::min(code, 255.0f));
    }
}

float norm_of(const float* x, int n) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += double{x[i]} * x[i];
    return static_cast<float>(std::sqrt(sum));
}

BFloat16 to_bfloat16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return {static_cast<std::uint16_t>((bits | 0x400000) >> 16)};
    return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// Computes the data of one page after the other.
class Page {
  public:
    Page(const Pages& pages, const SegmentKeys& keys, const PageSet& set)
        : pages_(pages), keys_(keys), set_(set), row_(2 * keys.head_dim) {}

    void encode_center(std::int64_t page) {
        const int d = keys_.head_dim;
        const std::int64_t begin = set_.first[page], end = set_.first[page + 1];
        std::fill(row_.begin(), row_.end(), 0.0f);
        if (pages_.box) {
            for (std::int64_t m = begin; m < end; ++m) {
                const float* key = keys_.key(set_.member(m));
                for (int i = 0; i < d; ++i) {
                    row_[i] = m == begin ? key[i] : std::max(row_[i], key[i]);
                    row_[d + i] = m == begin ? key[i] : std::min(row_[d + i], key[i]);
                }
            }
            encode_box(row_.data(), d, page, set_.center, set_.center_scales);
            raise_norm(2 * d);
            return;
        }
        for (std::int64_t m = begin; m < end; ++m) {
            const float* key = keys_.key(set_.member(m));
            for (int i = 0; i < d; ++i) row_[i] += key[i];
        }
        const float share = end > begin ? 1.0f / static_cast<float>(end - begin) : 0;
        for (int i = 0; i < d; ++i) row_[i] *= share;
        encode(row_.data(), d, page, set_.center, set_.center_scales);
        raise_norm(d);
    }

    // The residuals of the members, relative to the values that the center's codes stand for.
    void encode_residuals(std::int64_t page, double* squares) {
        const int d = keys_.head_dim, block = d / kChannelBlocks;
        double radius[kChannelBlocks] = {};  // a float cannot hold 1e20 squared, or 1e-23 squared
        double most = -1;
        std::int64_t farthest = 0;
        for (std::int64_t m = set_.first[page]; m < set_.first[page + 1]; ++m) {
            const float* key = keys_.key(set_.member(m));
            double whole = 0;
            for (int b = 0; b < kChannelBlocks; ++b) {
                double sum = 0;
                for (int i = b * block; i < (b + 1) * block; ++i) {
                    const double rest = double{key[i]} - row_[i];
                    sum += rest * rest;
                }
                squares[b] += sum;
                radius[b] = std::max(radius[b], sum);
                whole += sum;
            }
            if (whole > most) {
                most = whole;
                farthest = set_.member(m);
            }
        }
        float lengths[kChannelBlocks];
        for (int b = 0; b < kChannelBlocks; ++b) {
            lengths[b] = static_cast<float>(std::sqrt(radius[b]) * 1.000001);
        }
        encode_radius(lengths, page, set_.radius, set_.radius_scales);
        if (!set_.farthest) return;
        std::fill(row_.begin(), row_.end(), 0.0f);
        if (most >= 0) std::copy_n(keys_.key(farthest), d, row_.begin());
        encode(row_.data(), d, page, set_.farthest, set_.farthest_scales);
        raise_norm(d);
    }

  private:
    void raise_norm(int dims) { *set_.norm = std::max(*set_.norm, norm_of(row_.data(), dims)); }

    const Pages& pages_;
    const SegmentKeys& keys_;
    const PageSet& set_;
    std::vector<float> row_;
};

void mean_values(const Blocks& blocks, const Pages& pages, std::int64_t segment, int kv_head,
                 const PageSet& set) {
    const int d = pages.value_dim;
    std::vector<float> values(pages.tokens * d), mean(d);
    const auto dtype = static_cast<int>(blocks.geometry.dtype);
    score_kernels().widen_values[dtype](
        {blocks, kv_head, pages.begin + segment * pages.tokens, pages.tokens, values.data()});
    for (std::int64_t page = 0; page < pages.pages; ++page) {
        const std::int64_t begin = set.first[page], end = set.first[page + 1];
        std::fill(mean.begin(), mean.end(), 0.0f);
        for (std::int64_t m = begin; m < end; ++m) {
            const float* value = values.data() + set.member(m) * d;
            for (int i = 0; i < d; ++i) mean[i] += value[i];
        }
        const float share = end > begin ? 1.0f / static_cast<float>(end - begin) : 0;
        for (int i = 0; i < d; ++i) {
            float value = mean[i] * share;
            if (!std::isfinite(value)) {  // the sum is more than a float holds, the mean is not
                value = 0;
                for (std::int64_t m = begin; m < end; ++m) {
                    value += values[set.member(m) * d + i] * share;
                }
            }
            set.values[page * d + i] = to_bfloat16(value);
        }
    }
}

}  // namespace

SegmentKeys::SegmentKeys(const Blocks& blocks, int kv_head, std::int64_t begin, std::int64_t n)
    : tokens(n),
      head_dim(blocks.geometry.head_dim),
      keys(n * blocks.geometry.head_dim),
      shift(blocks.geometry.head_dim) {
    const auto dtype = static_cast<int>(blocks.geometry.dtype);
    score_kernels().widen_keys[dtype]({blocks, kv_head, begin, n, keys.data()});
    std::vector<double> sum(head_dim);
    for (std::int64_t t = 0; t < n; ++t) {
        for (int i = 0; i < head_dim; ++i) sum[i] += keys[t * head_dim + i];
    }
    for (int i = 0; i < head_dim; ++i) shift[i] = static_cast<float>(sum[i] / n);
    for (std::int64_t t = 0; t < n; ++t) {
        for (int i = 0; i < head_dim; ++i) keys[t * head_dim + i] -= shift[i];
    }
}

void represent(const Blocks& blocks, const Pages& pages, std::int64_t segment, int kv_head,
               const SegmentKeys& keys, const PageSet& set) {
    std::copy(keys.shift.begin(), keys.shift.end(), set.shift);
    *set.norm = 0;
    double squares[kChannelBlocks] = {};
    Page page(pages, keys, set);
    for (std::int64_t p = 0; p < pages.pages; ++p) {
        page.encode_center(p);
        if (set.radius) page.encode_residuals(p, squares);
    }
    const double channels = double(pages.tokens) * (pages.head_dim / kChannelBlocks);
    for (int b = 0; b < kChannelBlocks; ++b) {
        set.spread[b] = static_cast<float>(squares[b] / channels);
    }
    if (set.values) mean_values(blocks, pages, segment, kv_head, set);
}

}  // namespace kvdb::indexes::coarse
