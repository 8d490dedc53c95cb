// Copies rows of bytes, and on the way checks for values that are not finite.
#pragma once

#include "kernels.h"
#include "simd/generic.h"

namespace kvdb::kernels {

template <class Isa>
struct Unchecked {
    KVDB_INLINE void add(typename Isa::u16) {}
    bool passed() const { return true; }
};

// An element is finite if its bits without the sign are below those of infinity, so it is enough to
// know the largest.
template <class Isa, class T, class Bits, std::uint32_t infinity>
struct Finite {
    using Vector = std::conditional_t<sizeof(T) == 4, typename Isa::u32, typename Isa::u16>;
    Vector largest{};

    KVDB_INLINE void add(typename Isa::u16 chunk) {
        const Vector bits = (Vector)chunk & static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
        largest = bits > largest ? bits : largest;
    }
    bool passed() const {
        bool finite = true;
        for (unsigned lane = 0; lane < sizeof(Vector) / sizeof(Bits); ++lane) {
            finite = finite && largest[lane] < infinity;
        }
        return finite;
    }
};

template <class Isa>
struct Copy {
    using Chunk = typename Isa::u16;

    static bool plain(const CopyItem& item) { return run<Unchecked<Isa>>(item); }

    static bool finite_float32(const CopyItem& item) {
        return run<Finite<Isa, float, std::uint32_t, 0x7f800000>>(item);
    }
    static bool finite_float16(const CopyItem& item) {
        return run<Finite<Isa, Float16, std::uint16_t, 0x7c00>>(item);
    }
    static bool finite_bfloat16(const CopyItem& item) {
        return run<Finite<Isa, BFloat16, std::uint16_t, 0x7f80>>(item);
    }

    static std::uint64_t read(const std::byte* from, std::size_t bytes) {
        constexpr int ways = 8;  // independent sums, 512 bytes with the widest vectors
        Chunk sums[ways] = {};
        std::size_t i = 0;
        for (; i + sizeof sums <= bytes; i += sizeof sums) {
            KVDB_UNROLL
            for (int j = 0; j < ways; ++j) {
                const std::byte* at = from + i + j * sizeof(Chunk);
                __builtin_prefetch(at + kReadAhead);
                sums[j] ^= Isa::template load<Chunk>(at);
            }
        }
        std::uint64_t words[sizeof sums / 8];
        __builtin_memcpy(words, sums, sizeof sums);
        std::uint64_t result = 0;
        for (const std::uint64_t word : words) result ^= word;
        for (; i < bytes; i += 8) result ^= Isa::template load<std::uint64_t>(from + i);
        return result;
    }

  private:
    static constexpr std::size_t kReadAhead = 4096;

    template <class Check>
    static bool run(const CopyItem& item) {
        Check check;
        const std::uintptr_t misaligned = reinterpret_cast<std::uintptr_t>(item.to) |
                                          static_cast<std::uintptr_t>(item.to_stride) |
                                          item.row_bytes;
        if (item.stream && misaligned % sizeof(Chunk) == 0) {
            rows<Check, true>(item, check);
            Isa::stream_end();
        } else {
            rows<Check, false>(item, check);
        }
        return check.passed();
    }

    template <class Check, bool stream>
    static void rows(const CopyItem& item, Check& result) {
        Check check;  // a local, to stay in a register
        const std::size_t whole = item.row_bytes / sizeof(Chunk) * sizeof(Chunk);
        for (std::int64_t row = 0; row < item.rows; ++row) {
            std::byte* to = item.to + row * item.to_stride;
            const std::byte* from = item.from + row * item.from_stride;
            for (std::size_t i = 0; i < whole; i += sizeof(Chunk)) {
                const Chunk chunk = Isa::template load<Chunk>(from + i);
                check.add(chunk);
                if constexpr (stream) {
                    Isa::stream(to + i, chunk);
                } else {
                    Isa::store(to + i, chunk);
                }
            }
            for (std::size_t i = whole; i < item.row_bytes; i += 16) {
                Chunk chunk{};
                __builtin_memcpy(&chunk, from + i, 16);
                check.add(chunk);
                __builtin_memcpy(to + i, &chunk, 16);
            }
        }
        result = check;
    }
};

}  // namespace kvdb::kernels
