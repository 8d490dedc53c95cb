// Single keys and values of quantized blocks, in float32.
#pragma once

#include "block_format.h"
#include "hadamard.h"

namespace kvdb::simd {

template <class Isa>
class CodedRow {
    // Where the code of a number lies: a byte, and for four bits which half of it.
    struct CodeAt {
        std::size_t byte;
        int shift;
    };

  public:
    // Of channel c of token t.
    template <Plane plane>
    static constexpr CodeAt code_at(int bits, int head_dim, int t, int c) {
        const int step = bits == 8 ? 4 : 8;  // channels, or tokens, of a 32-bit lane
        if (plane == Plane::key) {
            const std::size_t group =
                std::size_t{1} * t / kQuantizedGroup * kQuantizedGroup * head_dim;
            const std::size_t lane =
                std::size_t{1} * c / step * kQuantizedGroup + t % kQuantizedGroup;
            return {group * bits / 8 + lane * 4 + c % 4, bits == 8 ? 0 : c / 4 % 2 * 4};
        }
        const std::size_t lane = std::size_t{1} * t / step * head_dim + c;
        return {lane * 4 + t % 4, bits == 8 ? 0 : t / 4 % 2 * 4};
    }

    // Values of eight bits are multiplied as signed numbers; the top bit tells both ways.
    template <Plane plane>
    static constexpr int stored(int bits, int code) {
        return plane == Plane::value && bits == 8 ? code ^ 0x80 : code;
    }

    static float load_bfloat16(const std::byte* at) {
        std::uint16_t half;
        __builtin_memcpy(&half, at, sizeof half);
        return __builtin_bit_cast(float, std::uint32_t{half} << 16);
    }

    // The key or value at slot t of one KV head, still rotated; x has room for kHeadDimMax.
    template <Plane plane>
    static void load(int head_dim, const QuantizedHead& layout, int bits, const std::byte* head,
                     int t, float* x) {
        constexpr bool keys = plane == Plane::key;
        const std::byte* codes = keys ? head : head + layout.values;
        const std::byte* centre = head + (keys ? layout.key_centre : layout.value_centre);
        const std::byte* scales = head + (keys ? layout.key_scales : layout.value_scales);
        const float zero = static_cast<float>((1 << bits) - 1) / 2;
        const int mask = (1 << bits) - 1;
        const float scale = load_bfloat16(scales + 2 * t);
        for (int c = 0; c < head_dim; ++c) {
            const CodeAt at = code_at<plane>(bits, head_dim, t, c);
            const int code = static_cast<int>(codes[at.byte]) >> at.shift & mask;
            x[c] = load_bfloat16(centre + 2 * c) +
                   scale * (static_cast<float>(stored<plane>(bits, code)) - zero);
        }
    }

    // The same of a token of a run of blocks of one format, which their addresses tell.
    template <Plane plane>
    static void load(const Geometry& geometry, const std::uint64_t* table, int kv_head,
                     std::int64_t token, float* x) {
        const std::uint64_t address = table[token / geometry.block_size];
        const BlockFormat format = format_of(address);
        const QuantizedHead layout(geometry, key_bits(format), value_bits(format));
        const auto* head = reinterpret_cast<const std::byte*>(address & ~kFormatMask) +
                           static_cast<std::size_t>(kv_head) * layout.bytes;
        const int bits = plane == Plane::key ? key_bits(format) : value_bits(format);
        load<plane>(geometry.head_dim, layout, bits, head,
                    static_cast<int>(token % geometry.block_size), x);
    }

    // As it was stored, but for what quantizing changed.
    template <Plane plane>
    static void load_back(const Geometry& geometry, const std::uint64_t* table, int kv_head,
                          std::int64_t token, float* x) {
        load<plane>(geometry, table, kv_head, token, x);
        Hadamard<Isa>::rotate_back(x, geometry.head_dim);
    }
};

}  // namespace kvdb::simd
