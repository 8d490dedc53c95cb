// The arithmetic of matrix tiles (see amx.h) on a machine that has none.
#pragma once

#include "generic.h"

namespace kvdb::simd {

// Rounds as the processor does: the even and the odd elements of the
// pairs are summed apart, by fused multiplications rounded to nearest even, and denormal numbers
// are zero wherever they appear.
template <class Isa>
class EmulatedTiles {
    using f32 = typename Isa::f32;
    using u32 = typename Isa::u32;

  public:
    template <int tile>
    KVDB_INLINE void zero() {
        for (f32& row : tiles_[tile]) row = f32{};
    }
    template <int tile>
    KVDB_INLINE void load(const void* from, std::int64_t stride) {
        for (int r = 0; r < kTileRows; ++r) {
            tiles_[tile][r] =
                Isa::template load<f32>(static_cast<const std::byte*>(from) + r * stride);
        }
    }
    template <int tile>
    KVDB_INLINE void store(void* to, std::int64_t stride) const {
        for (int r = 0; r < kTileRows; ++r) {
            Isa::store(static_cast<std::byte*>(to) + r * stride, tiles_[tile][r]);
        }
    }
    template <int sums, int a, int b>
    void dot_pairs() {
        for (int m = 0; m < kTileRows; ++m) {
            f32 even{}, odd{};
            for (int k = 0; k < kTileLanes; ++k) {
                const f32 pair = Isa::splat(tiles_[a][m][k]);
                even = normal(Isa::fma(low(pair), low(tiles_[b][k]), even));
                odd = normal(Isa::fma(high(pair), high(tiles_[b][k]), odd));
            }
            tiles_[sums][m] = normal(normal(tiles_[sums][m]) + normal(even + odd));
        }
    }

    template <int sums, int a, int b>
    void dot_bytes() {
        for (int m = 0; m < kTileRows; ++m) {
            u32 sum = (u32)tiles_[sums][m];  // integers wrap around
            for (int k = 0; k < kTileLanes; ++k) {
                const u32 four = (u32)Isa::splat(tiles_[a][m][k]), bytes = (u32)tiles_[b][k];
                for (int j = 0; j < 4; ++j) {
                    const u32 byte = four >> (8 * j) & 255;
                    const u32 is_negative = (byte >> 7) * 256;
                    sum += (byte - is_negative) * (bytes >> (8 * j) & 255);
                }
            }
            tiles_[sums][m] = (f32)sum;
        }
    }

  private:
    KVDB_INLINE static f32 low(f32 pairs) { return normal((f32)((u32)pairs << 16)); }
    KVDB_INLINE static f32 high(f32 pairs) { return normal((f32)((u32)pairs & 0xffff0000u)); }
    KVDB_INLINE static f32 normal(f32 v) {
        const u32 exponent = (u32)v & 0x7f800000u;
        return exponent == 0 ? (f32)((u32)v & 0x80000000u) : v;
    }

    f32 tiles_[8][kTileRows];
};

}  // namespace kvdb::simd
