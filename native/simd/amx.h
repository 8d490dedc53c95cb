// Avx512Bf16 with tiles: eight registers of 16 rows of 64 bytes, and a product that adds to a tile
// of 16 x 16 floats that of 16 rows of 16 bfloat16 pairs with 16 columns of them, or to one of
// integers that of four bytes for each pair.
#pragma once

#include "avx512_bf16.h"
#include "emulated_tiles.h"

namespace kvdb::simd {

// The registers of this thread, from construction to destruction. Assembler, so that the compiler
// emits none of it elsewhere. Strides are in bytes.
class AmxTiles {
  public:
    AmxTiles() {
        struct alignas(64) {
            std::uint8_t palette, start_row, reserved[14];
            std::uint16_t row_bytes[16];
            std::uint8_t rows[16];
        } config = {};
        config.palette = 1;
        for (int i = 0; i < 8; ++i) {
            config.row_bytes[i] = kTileLanes * sizeof(float);
            config.rows[i] = kTileRows;
        }
        asm volatile("ldtilecfg %0" : : "m"(config));
    }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;
    ~AmxTiles() { asm volatile("tilerelease"); }

    template <int tile>
    KVDB_INLINE void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(tile));
    }
    template <int tile>
    KVDB_INLINE void load(const void* from, std::int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                     :
                     : "r"(from), "r"(stride), "i"(tile)
                     : "memory");
    }
    template <int tile>
    KVDB_INLINE void store(void* to, std::int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                     :
                     : "r"(to), "r"(stride), "i"(tile)
                     : "memory");
    }
    // sums[m][n] += the dot product of a's row m with b's column n.
    template <int sums, int a, int b>
    KVDB_INLINE void dot_pairs() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
    }
    // The same of signed bytes with unsigned ones, four to a lane, in 32-bit integers.
    template <int sums, int a, int b>
    KVDB_INLINE void dot_bytes() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
    }
};

struct Amx : Avx512Bf16 {
    static constexpr bool has_tiles = true;
    using Tiles = AmxTiles;
};

struct AmxEmulated : Avx512Bf16 {
    static constexpr bool has_tiles = true;
    using Tiles = EmulatedTiles<AmxEmulated>;
};

}  // namespace kvdb::simd
