// Single keys and values of quantized blocks, in float32.
#pragma once

#include "block_format.h"
#include "hadamard.h"

namespace kvdb::simd {

template <class Isa>
class CodedRow {
    using f32 = typename Isa::f32;
    using u32 = typename Isa::u32;

    // Where the code of a number lies: a byte, and for four bits which half of it.
    struct CodeAt {
        std::size_t byte;
        int shift;
    };

    // Where a token's row lies.
    template <Plane plane>
    struct Place {
        int bits;
        QuantizedHead layout;
        const std::byte* head;
        int slot;

        KVDB_INLINE Place(const Geometry& geometry, const std::uint64_t* table, int kv_head,
                          std::int64_t token)
            : Place(geometry, table[token / geometry.block_size], kv_head,
                    static_cast<int>(token % geometry.block_size)) {}

      private:
        KVDB_INLINE Place(const Geometry& geometry, std::uint64_t address, int kv_head, int slot)
            : bits(plane == Plane::key ? key_bits(format_of(address))
                                       : value_bits(format_of(address))),
              layout(geometry, key_bits(format_of(address)), value_bits(format_of(address))),
              head(reinterpret_cast<const std::byte*>(address & ~kFormatMask) +
                   static_cast<std::size_t>(kv_head) * layout.bytes),
              slot(slot) {}
    };

    // Calls body(channel, code less zero, scale, centre) for each vector of channels. Behind the
    // last channel the lanes are anything.
    template <Plane plane>
    KVDB_INLINE static void each(int head_dim, const QuantizedHead& layout, int bits,
                                 const std::byte* head, int t, auto&& body) {
        constexpr bool keys = plane == Plane::key;
        const auto* centre = reinterpret_cast<const BFloat16*>(
            head + (keys ? layout.key_centre : layout.value_centre));
        const std::byte* scales = head + (keys ? layout.key_scales : layout.value_scales);
        const f32 scale = Isa::splat(load_bfloat16(scales + 2 * t));
        if constexpr (keys) {
            alignas(64) std::uint8_t codes[kHeadDimMax];
            bits == 8 ? gather<8>(head_dim, head, t, codes) : gather<4>(head_dim, head, t, codes);
            const float zero = static_cast<float>((1 << bits) - 1) / 2;
            for (int c = 0; c < head_dim; c += Isa::width) {
                body(c, Isa::widen(codes + c) - zero, scale, Isa::widen(centre + c));
            }
        } else {
            bits == 8 ? values<8>(head_dim, head + layout.values, t, scale, centre, body)
                      : values<4>(head_dim, head + layout.values, t, scale, centre, body);
        }
    }

    // A key's codes, a byte each, in the order of channels.
    template <int bits>
    KVDB_INLINE static void gather(int head_dim, const std::byte* codes, int t, std::uint8_t* out) {
        constexpr int step = 32 / bits;  // channels of a lane
        const CodeAt first = code_at<Plane::key>(bits, head_dim, t, 0);
        const std::byte* from = codes + first.byte;
        for (int c = 0; c < head_dim; c += step, from += 4 * kQuantizedGroup, out += step) {
            std::uint32_t lane;
            __builtin_memcpy(&lane, from, sizeof lane);
            if constexpr (bits == 8) {
                __builtin_memcpy(out, &lane, sizeof lane);
            } else {
                const std::uint64_t both =
                    (lane & 0x0f0f0f0fu) | std::uint64_t{lane >> 4 & 0x0f0f0f0fu} << 32;
                __builtin_memcpy(out, &both, sizeof both);
            }
        }
    }

    template <int bits>
    KVDB_INLINE static void values(int head_dim, const std::byte* codes, int t, f32 scale,
                                   const BFloat16* centre, auto&& body) {
        constexpr float zero = static_cast<float>((1 << bits) - 1) / 2;
        constexpr std::uint32_t flip = stored<Plane::value>(bits, 0);
        constexpr int step = 32 / bits;  // tokens of a lane
        const int shift = t % 4 * 8 + (bits == 8 ? 0 : t / 4 % 2 * 4);
        const std::byte* from = codes + std::size_t{4} * (t / step) * head_dim;
        for (int c = 0; c < head_dim; c += Isa::width) {
            const u32 lanes = Isa::template load<u32>(from + 4 * c);
            const u32 code = (lanes >> shift & ((1u << bits) - 1)) ^ flip;
            body(c, __builtin_convertvector((typename Isa::i32)code, f32) - zero, scale,
                 Isa::widen(centre + c));
        }
    }

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
        each<plane>(head_dim, layout, bits, head, t, [&](int c, f32 number, f32 scale, f32 centre) {
            Isa::store(x + c, Isa::fma(number, scale, centre));
        });
    }

    // Adds it, times a weight.
    template <Plane plane>
    static void add(const Geometry& geometry, const std::uint64_t* table, int kv_head,
                    std::int64_t token, float weight, float* sums) {
        const Place<plane> at(geometry, table, kv_head, token);
        const f32 weights = Isa::splat(weight);
        each<plane>(geometry.head_dim, at.layout, at.bits, at.head, at.slot,
                    [&](int c, f32 number, f32 scale, f32 centre) {
                        const f32 x = Isa::fma(number, scale, centre);
                        Isa::store(sums + c,
                                   Isa::fma(x, weights, Isa::template load<f32>(sums + c)));
                    });
    }

    // The same of a token of a run of blocks of one format, which their addresses tell.
    template <Plane plane>
    static void load(const Geometry& geometry, const std::uint64_t* table, int kv_head,
                     std::int64_t token, float* x) {
        const Place<plane> at(geometry, table, kv_head, token);
        load<plane>(geometry.head_dim, at.layout, at.bits, at.head, at.slot, x);
    }

    // Asks for what a token's codes lie in, and for what stands beside them.
    template <Plane plane>
    KVDB_INLINE static void prefetch(const Geometry& geometry, const std::uint64_t* table,
                                     int kv_head, std::int64_t token) {
        const Place<plane> at(geometry, table, kv_head, token);
        constexpr bool keys = plane == Plane::key;
        const int together = keys ? kQuantizedGroup : 32 / at.bits;
        const std::size_t bytes = std::size_t{1} * together * geometry.head_dim * at.bits / 8;
        const std::byte* codes =
            (keys ? at.head : at.head + at.layout.values) + at.slot / together * bytes;
        for (std::size_t i = 0; i < bytes; i += 64) __builtin_prefetch(codes + i);
        const std::byte* centre = at.head + (keys ? at.layout.key_centre : at.layout.value_centre);
        for (int i = 0; i < 2 * geometry.head_dim; i += 64) __builtin_prefetch(centre + i);
        __builtin_prefetch(at.head + (keys ? at.layout.key_scales : at.layout.value_scales) +
                           2 * at.slot);
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
