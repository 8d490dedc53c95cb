// Dot products with codes of four bits, two of which share a byte, in one instruction set.
#pragma once

#include "simd/generic.h"

namespace kvdb::indexes {

inline constexpr int kPrefetchBytes = 4096;  // how far ahead codes are fetched

// Adds to sums[r][v], in each lane, the products of eight codes of vector v at `from` with eight
// bytes of row r: those of the codes in the low halves with the four of `low`, the others with
// those of `high`.
template <class Isa, int rows, int vectors>
KVDB_INLINE void dot_codes(const std::uint8_t* from, const typename Isa::i32 (&low)[rows],
                           const typename Isa::i32 (&high)[rows],
                           typename Isa::i32 (&sums)[rows][vectors]) {
    using u32 = typename Isa::u32;
    constexpr int bytes = Isa::width * 4;
    KVDB_UNROLL
    for (int v = 0; v < vectors; ++v) {
        __builtin_prefetch(from + v * bytes + kPrefetchBytes);
        const u32 both = Isa::template load<u32>(from + v * bytes);
        const u32 first = both & 0x0f0f0f0fu, second = both >> 4 & 0x0f0f0f0fu;
        KVDB_UNROLL
        for (int r = 0; r < rows; ++r) {
            sums[r][v] =
                Isa::dot_nibbles(second, high[r], Isa::dot_nibbles(first, low[r], sums[r][v]));
        }
    }
}

}  // namespace kvdb::indexes
