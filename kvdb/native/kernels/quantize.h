// Quantizes the keys and values of one KV head of a block, and takes that back.
#pragma once

#include "kernels.h"
#include "simd/coded_row.h"

namespace kvdb::kernels {

template <class Isa, class T>
class Quantize {
    using f32 = typename Isa::f32;
    using Coded = simd::CodedRow<Isa>;

  public:
    static std::size_t scratch_bytes(const Geometry& geometry) {
        return sizeof(float) * geometry.block_size * round_up(geometry.head_dim, kLanePadding);
    }

    static void encode(const QuantizeItem& item) {
        const QuantizedHead head(item.geometry, item.key_bits, item.value_bits);
        encode<Plane::key>(item, item.key_bits, item.keys, item.to, item.to + head.key_centre,
                           item.to + head.key_scales, item.error[0], item.norm[0]);
        encode<Plane::value>(item, item.value_bits, item.values, item.to + head.values,
                             item.to + head.value_centre, item.to + head.value_scales,
                             item.error[1], item.norm[1]);
    }

    static void decode(const DequantizeItem& item) {
        const QuantizedHead head(item.geometry, item.key_bits, item.value_bits);
        if (item.keys) decode<Plane::key>(item, head, item.key_bits, item.keys, item.key_stride);
        if (item.values) {
            decode<Plane::value>(item, head, item.value_bits, item.values, item.value_stride);
        }
    }

  private:
    template <Plane plane>
    static void encode(const QuantizeItem& item, int bits, const std::byte* rows, std::byte* codes,
                       std::byte* centre, std::byte* scales, double& error, double& norm) {
        const int head_dim = item.geometry.head_dim;
        const std::int64_t stride = round_up(head_dim, kLanePadding);
        for (int t = 0; t < item.tokens; ++t) {
            float* x = item.scratch + t * stride;
            widen(reinterpret_cast<const T*>(rows) + std::int64_t{t} * head_dim, head_dim, x);
            simd::Hadamard<Isa>::rotate(x, head_dim);
            for (int c = 0; c < head_dim; ++c) norm += double{x[c]} * x[c];
        }
        subtract_mean(item, stride, centre);
        const float zero = static_cast<float>((1 << bits) - 1) / 2;
        const std::size_t code_bytes =
            std::size_t{1} * item.geometry.block_size * head_dim * bits / 8;
        __builtin_memset(codes, 0, code_bytes);
        __builtin_memset(scales, 0, 2 * item.geometry.block_size);
        for (int t = 0; t < item.tokens; ++t) {
            const float* x = item.scratch + t * stride;
            float largest = 0;
            for (int c = 0; c < head_dim; ++c) {
                const float size = __builtin_fabsf(x[c]);
                if (!(size <= largest)) largest = size;
            }
            const float scale = store_up(scales + 2 * t, largest / zero);
            const float inverse = scale > 0 ? 1 / scale : 0;
            for (int c = 0; c < head_dim; ++c) {
                const int code = round(x[c] * inverse + zero, 2 * zero);
                const auto at = Coded::template code_at<plane>(bits, head_dim, t, c);
                codes[at.byte] |=
                    static_cast<std::byte>(Coded::template stored<plane>(bits, code) << at.shift);
                const double off = x[c] - scale * (static_cast<float>(code) - zero);
                error += off * off;
            }
        }
    }

    // The mean of the rows, rounded, is taken off them.
    static void subtract_mean(const QuantizeItem& item, std::int64_t stride, std::byte* centre) {
        const float share = 1 / static_cast<float>(item.tokens > 0 ? item.tokens : 1);
        for (int c = 0; c < item.geometry.head_dim; ++c) {
            float sum = 0;
            for (int t = 0; t < item.tokens; ++t) sum += item.scratch[t * stride + c] * share;
            const float mean = store_bfloat16(centre + 2 * c, sum, 0x8000);
            for (int t = 0; t < item.tokens; ++t) item.scratch[t * stride + c] -= mean;
        }
    }

    template <Plane plane>
    static void decode(const DequantizeItem& item, const QuantizedHead& head, int bits,
                       std::byte* to, std::int64_t to_stride) {
        const int head_dim = item.geometry.head_dim;
        alignas(64) float x[kHeadDimMax];
        alignas(64) T narrow[kHeadDimMax];
        for (int t = item.begin; t < item.end; ++t, to += to_stride) {
            Coded::template load<plane>(head_dim, head, bits, item.from, t, x);
            simd::Hadamard<Isa>::rotate_back(x, head_dim);
            for (int c = 0; c < head_dim; c += Isa::width) {
                Isa::narrow(narrow + c, Isa::template load<f32>(x + c));
            }
            __builtin_memcpy(to, narrow, head_dim * sizeof(T));
        }
    }

    static int round(float x, float most) {
        return static_cast<int>(x < 0 ? 0 : x > most ? most : x + 0.5f);
    }

    static float store_bfloat16(std::byte* at, float x, std::uint32_t rounding) {
        const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x) + rounding;
        const auto half = static_cast<std::uint16_t>(bits >> 16);
        __builtin_memcpy(at, &half, sizeof half);
        return Coded::load_bfloat16(at);
    }
    // The smallest bfloat16 that is at least x >= 0.
    static float store_up(std::byte* at, float x) { return store_bfloat16(at, x, 0xffff); }

    static void widen(const T* from, int head_dim, float* to) {
        const int whole = head_dim / Isa::width * Isa::width;
        for (int i = 0; i < whole; i += Isa::width) Isa::store(to + i, Isa::widen(from + i));
        if constexpr (Isa::width > kHeadDimStep) {
            if (whole < head_dim) Isa::store(to + whole, Isa::widen_half(from + whole));
        }
    }
};

}  // namespace kvdb::kernels
