// The vector operations that kernels are written in, in terms of GCC/Clang vector extensions. They
// work everywhere; an instruction set derives from them and replaces what it can do better.
//
// `Tag` makes every instantiation a distinct type, so that no function compiled with the flags of
// one instruction set can be linked into another. Kernel code therefore consists of templates over
// the instruction set, and calls no inline function of the standard library.
#pragma once

#include <cstdint>
#include <utility>

#include "../geometry.h"

#define KVDB_INLINE [[gnu::always_inline]] inline
#define KVDB_UNROLL _Pragma("GCC unroll 16")

namespace kvdb::simd {

template <class T, int bytes>
struct Vector {
    typedef T type __attribute__((vector_size(bytes)));
};

// Of a matrix tile, where an instruction set has them.
inline constexpr int kTileRows = 16;
inline constexpr int kTileLanes = 16;  // 32-bit lanes of a row: floats, or pairs of bfloat16

template <class Tag, int lanes>
struct Generic {
    static constexpr int width = lanes;
    static constexpr bool has_bf16_dot = false;
    static constexpr bool has_scaling = false;  // by powers of two that are floats
    static constexpr bool has_tiles = false;    // of bfloat16, see amx.h
    static constexpr int registers = 16;
    // The register tile of the matrix kernel: rows of A by vectors of B.
    static constexpr int tile_rows = 6;
    static constexpr int tile_vectors = 2;

    using f32 = typename Vector<float, 4 * lanes>::type;
    using i32 = typename Vector<std::int32_t, 4 * lanes>::type;
    using u32 = typename Vector<std::uint32_t, 4 * lanes>::type;
    using u16 = typename Vector<std::uint16_t, 4 * lanes>::type;
    using u8_quarter = typename Vector<std::uint8_t, lanes>::type;
    using u16_half = typename Vector<std::uint16_t, 2 * lanes>::type;

    template <class V>
    KVDB_INLINE static V load(const void* from) {
        V v;
        __builtin_memcpy(&v, from, sizeof v);
        return v;
    }
    template <class V>
    KVDB_INLINE static void store(void* to, V v) {
        __builtin_memcpy(to, &v, sizeof v);
    }

    KVDB_INLINE static f32 splat(float x) {
        f32 v;
        KVDB_UNROLL
        for (int i = 0; i < lanes; ++i) v[i] = x;  // x may be any bits: no arithmetic
        return v;
    }
    KVDB_INLINE static f32 fma(f32 a, f32 b, f32 c) { return a * b + c; }
    KVDB_INLINE static f32 max(f32 a, f32 b) { return a > b ? a : b; }

    // `lanes` elements as floats.
    KVDB_INLINE static f32 widen(const float* from) { return load<f32>(from); }
    KVDB_INLINE static f32 widen(const std::uint8_t* from) {
        return __builtin_convertvector(__builtin_convertvector(load<u8_quarter>(from), i32), f32);
    }
    KVDB_INLINE static f32 widen(const BFloat16* from) {
        return (f32)(__builtin_convertvector(load<u16_half>(from), u32) << 16);
    }
    KVDB_INLINE static f32 widen(const Float16* from) {
        const u32 x = __builtin_convertvector(load<u16_half>(from), u32);
        const u32 magnitude = (x & 0x7fff) << 13;
        // Scaling by a power of two is exact and gives subnormal halves their true exponent.
        const u32 finite = (u32)((f32)magnitude * 0x1p112f);
        const u32 special = (u32)(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
        return (f32)(finite | special | ((x & 0x8000) << 16));
    }

    // Rounds to nearest, ties to even.
    KVDB_INLINE static void narrow(float* to, f32 v) { store(to, v); }
    KVDB_INLINE static void narrow(BFloat16* to, f32 v) {
        const u32 bits = (u32)v;
        const u32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
        const u32 quiet = bits | 0x400000;
        store(to, __builtin_convertvector((v == v ? rounded : quiet) >> 16, u16_half));
    }
    KVDB_INLINE static void narrow(Float16* to, f32 v) {
        const u32 sign = (u32)v & 0x80000000u;
        const u32 magnitude = (u32)v ^ sign;
        const u32 special = (v == v) ? u32{} + 0x7c00 : u32{} + 0x7e00;
        // Adding 0.5 shifts a value below 2^-14 into place and rounds it.
        const u32 small = (u32)((f32)magnitude + 0.5f) - 0x3f000000u;
        const u32 normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        const u32 result = magnitude >= (143u << 23)  ? special
                           : magnitude < (113u << 23) ? small
                                                      : normal;
        store(to, __builtin_convertvector(result | (sign >> 16), u16_half));
    }

    // Adds to each lane the dot product of its four bytes, of 0 to 15, with four signed ones.
    KVDB_INLINE static i32 dot_nibbles(u32 nibbles, i32 bytes, i32 sum) {
        KVDB_UNROLL
        for (int at = 0; at < 32; at += 8) {
            sum += (i32)(nibbles >> at & 15) * (bytes << (24 - at) >> 24);
        }
        return sum;
    }
    // A bit for each lane that is 0; the others are -1.
    KVDB_INLINE static std::uint32_t clear_lanes(i32 v) {
        std::uint32_t bits = 0;
        KVDB_UNROLL
        for (int i = 0; i < lanes; ++i) bits |= static_cast<std::uint32_t>(v[i] + 1) << i;
        return bits;
    }
    // For each of `rows` rows of signed bytes, [rows][stride], the sum of those whose bit is set.
    template <int rows, int stride>
    KVDB_INLINE static void sum_chosen(const std::uint8_t* bits, int count,
                                       const std::int8_t* bytes, std::int32_t* sums) {
        for (int r = 0; r < rows; ++r) sums[r] = 0;
        for (int i = 0; i < count; ++i) {
            const std::int32_t chosen = -(bits[i / 8] >> (i % 8) & 1);
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) sums[r] += bytes[r * stride + i] & chosen;
        }
    }
    // A bit for each of 64 values that is at least `least`.
    KVDB_INLINE static std::uint64_t at_least(const std::uint16_t* values, std::uint16_t least) {
        std::uint64_t bits = 0;
        for (int i = 0; i < 64; ++i) bits |= std::uint64_t{values[i] >= least} << i;
        return bits;
    }

    // A store that need not stay in the caches. `to` is aligned to the vector.
    KVDB_INLINE static void stream(void* to, u16 v) { store(to, v); }
    KVDB_INLINE static void stream_end() {}
};

// ---- what follows from the operations above
// ------------------------------------------------------

// 2^f for f in [-1/2, 1/2]: a minimax polynomial, of relative error below 1e-7.
template <class Isa>
KVDB_INLINE typename Isa::f32 exp2_of_fraction(typename Isa::f32 f) {
    typename Isa::f32 p = Isa::splat(0.00132647272f);
    p = Isa::fma(p, f, Isa::splat(0.00967151264f));
    p = Isa::fma(p, f, Isa::splat(0.05550733743f));
    p = Isa::fma(p, f, Isa::splat(0.2402224209f));
    p = Isa::fma(p, f, Isa::splat(0.6931469776f));
    return Isa::fma(p, f, Isa::splat(1.0f));
}

// 2^x for x <= 0; 0 below the normal range, NaN for NaN.
template <class Isa>
KVDB_INLINE typename Isa::f32 exp2(typename Isa::f32 x) {
    using f32 = typename Isa::f32;
    using i32 = typename Isa::i32;
    const auto underflows = x < -126.0f;
    if constexpr (Isa::has_scaling) {
        const f32 whole = Isa::round(x);
        const f32 scaled = Isa::scale(exp2_of_fraction<Isa>(x - whole), whole);
        return underflows ? f32{} : scaled;
    }
    const f32 clamped = underflows ? Isa::splat(-126.0f) : x;
    // In [2^23, 2^24) a float's spacing is 1: adding rounds to the nearest integer.
    const float rounding = 0x1.8p23f;
    const f32 shifted = clamped + rounding;
    const f32 p = exp2_of_fraction<Isa>(clamped - (shifted - rounding));
    const i32 exponent = ((i32)shifted - (0x4b400000 - 127)) << 23;
    return underflows ? f32{} : p * (f32)exponent;
}

template <class Isa>
using Lanes = std::make_integer_sequence<int, Isa::width>;

// The items of `a`, then those of `b`; `odd` chooses the odd or the even ones. Items are first the
// lanes of each 128 bits, then 128 bits as a whole, because shuffles do this in one instruction.
template <class Isa, bool whole, int odd, int... l>
KVDB_INLINE typename Isa::f32 every_other(typename Isa::f32 a, typename Isa::f32 b,
                                          std::integer_sequence<int, l...>) {
    constexpr int width = Isa::width;
    if constexpr (whole) {
        constexpr int half = width / 8;  // items of 4 lanes in the result that come from `a`
        return __builtin_shufflevector(
            a, b,
            (l / 4 < half ? 4 * (2 * (l / 4) + odd) + l % 4
                          : width + 4 * (2 * (l / 4 - half) + odd) + l % 4)...);
    } else {
        return __builtin_shufflevector(a, b,
                                       (l % 4 < 2 ? l / 4 * 4 + 2 * (l % 4) + odd
                                                  : width + l / 4 * 4 + 2 * (l % 4 - 2) + odd)...);
    }
}

// Lane l becomes what `fold` makes of the lanes of v[l]: a tree, which folds even with odd lanes.
template <class Isa, int count = Isa::width>
KVDB_INLINE typename Isa::f32 fold_each(typename Isa::f32* v, auto fold) {
    if constexpr (count == 1) {
        return v[0];
    } else {
        constexpr bool whole = count * 4 <= Isa::width;  // after two rounds inside 128 bits
        KVDB_UNROLL
        for (int i = 0; i < count / 2; ++i) {
            v[i] = fold(every_other<Isa, whole, 0>(v[2 * i], v[2 * i + 1], Lanes<Isa>{}),
                        every_other<Isa, whole, 1>(v[2 * i], v[2 * i + 1], Lanes<Isa>{}));
        }
        return fold_each<Isa, count / 2>(v, fold);
    }
}
template <class Isa>
KVDB_INLINE typename Isa::f32 sum_each(typename Isa::f32* v) {
    using f32 = typename Isa::f32;
    return fold_each<Isa>(v, [](f32 a, f32 b) __attribute__((always_inline)) { return a + b; });
}
template <class Isa>
KVDB_INLINE typename Isa::f32 max_each(typename Isa::f32* v) {
    using f32 = typename Isa::f32;
    return fold_each<Isa>(
        v, [](f32 a, f32 b) __attribute__((always_inline)) { return Isa::max(a, b); });
}

// Lane l takes a[l] and b[l - bit] (low) or a[l + bit] and b[l] (high), as bit is clear or set in
// l.
template <class Isa, int bit, int... l>
KVDB_INLINE typename Isa::f32 blend_low(typename Isa::f32 a, typename Isa::f32 b,
                                        std::integer_sequence<int, l...>) {
    return __builtin_shufflevector(a, b, ((l & bit) ? Isa::width + l - bit : l)...);
}
template <class Isa, int bit, int... l>
KVDB_INLINE typename Isa::f32 blend_high(typename Isa::f32 a, typename Isa::f32 b,
                                         std::integer_sequence<int, l...>) {
    return __builtin_shufflevector(a, b, ((l & bit) ? Isa::width + l : l + bit)...);
}

// width x width, in place.
template <class Isa, int bit = 1>
KVDB_INLINE void transpose(typename Isa::f32* v) {
    if constexpr (bit < Isa::width) {
        KVDB_UNROLL
        for (int i = 0; i < Isa::width; ++i) {
            if (i & bit) continue;
            const auto low = blend_low<Isa, bit>(v[i], v[i | bit], Lanes<Isa>{});
            v[i | bit] = blend_high<Isa, bit>(v[i], v[i | bit], Lanes<Isa>{});
            v[i] = low;
        }
        transpose<Isa, bit * 2>(v);
    }
}

template <class Isa, int bit, int... l>
KVDB_INLINE typename Isa::f32 exchange(typename Isa::f32 v, std::integer_sequence<int, l...>) {
    return __builtin_shufflevector(v, v, (l ^ bit)...);
}

// Each lane becomes the maximum, or the sum, over its group of `group` neighbours.
template <class Isa, int group>
KVDB_INLINE typename Isa::f32 max_of_group(typename Isa::f32 v) {
    if constexpr (group == 1) {
        return v;
    } else {
        return max_of_group<Isa, group / 2>(Isa::max(v, exchange<Isa, group / 2>(v, Lanes<Isa>{})));
    }
}
template <class Isa, int group>
KVDB_INLINE typename Isa::f32 sum_of_group(typename Isa::f32 v) {
    if constexpr (group == 1) {
        return v;
    } else {
        return sum_of_group<Isa, group / 2>(v + exchange<Isa, group / 2>(v, Lanes<Isa>{}));
    }
}
// Lane i becomes the sum of vector i, added up in the order of `sum_of_group`. Uses up `v`,
// [width].
template <class Isa, int half = Isa::width / 2>
KVDB_INLINE typename Isa::f32 sums_of_each(typename Isa::f32* v) {
    if constexpr (half > 0) {
        KVDB_UNROLL
        for (int i = 0; i < half; ++i) {
            v[i] = blend_low<Isa, half>(v[i], v[i + half], Lanes<Isa>{}) +
                   blend_high<Isa, half>(v[i], v[i + half], Lanes<Isa>{});
        }
        return sums_of_each<Isa, half / 2>(v);
    } else {
        return v[0];
    }
}

}  // namespace kvdb::simd
