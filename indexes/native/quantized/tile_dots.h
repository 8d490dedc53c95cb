// Products of a run's key codes with up to 16 rows of queries at once, by matrix tiles.
#pragma once

#include <cstring>

#include "../nibbles.h"
#include "kernels.h"

namespace kvdb::indexes::quantized {

// Codes of 16 tokens become bytes in memory, in which they lie as a tile's right factor does: four
// dimensions of each token to a row. All rows of queries are multiplied with them.
template <class Isa>
    requires Isa::has_tiles
class TileDots {
  public:
    static constexpr int kRows = simd::kTileRows;     // of queries
    static constexpr int kTokens = simd::kTileLanes;  // at a time
    static_assert(Isa::width == kTokens && kScanRows == kRows);

    // Whether the dimensions fill whole tiles.
    static bool takes(const Codes& codes) { return codes.head_dim % kDims == 0; }

    explicit TileDots(const ScanItem& item) : codes_(item.codes) {
        std::memset(queries_, 0, sizeof queries_);
        for (int r = 0; r < item.rows; ++r) {
            std::memcpy(queries_ + r * codes_.head_dim, item.query[r]->packed, codes_.head_dim);
        }
    }

    // sums [kRows][kTokens], of the tokens of a run from `first` on.
    void dots(typename Isa::Tiles& tiles, int run, int first, std::int32_t* sums) const {
        const int d = codes_.head_dim;
        const std::uint8_t* at = codes_.keys + std::int64_t{run} * d * kRun / 2 + first * 4;
        tiles.template zero<0>();
        for (int begin = 0; begin < d; begin += kDims, at += kDims / 8 * kGroupBytes) {
            alignas(64) std::uint8_t bytes[kTileBytes];
            unpack(at, bytes);
            tiles.template load<1>(queries_ + begin, d);
            tiles.template load<2>(bytes, kRowBytes);
            tiles.template dot_bytes<0, 1, 2>();
        }
        tiles.template store<0>(sums, kRowBytes);
    }

  private:
    static constexpr int kRowBytes = 4 * kTokens, kTileBytes = kRowBytes * simd::kTileRows;
    static constexpr int kDims = 4 * simd::kTileRows;  // whose codes a tile holds
    static constexpr int kGroupBytes = 4 * kRun;       // eight dimensions of a run

    KVDB_INLINE static void unpack(const std::uint8_t* from, std::uint8_t* to) {
        using u32 = typename Isa::u32;
        KVDB_UNROLL
        for (int i = 0; i < kDims / 8; ++i, from += kGroupBytes, to += 2 * kRowBytes) {
            __builtin_prefetch(from + kPrefetchBytes);
            const u32 both = Isa::template load<u32>(from);
            Isa::store(to, both & 0x0f0f0f0fu);
            Isa::store(to + kRowBytes, both >> 4 & 0x0f0f0f0fu);
        }
    }

    const Codes& codes_;
    alignas(64) std::int8_t queries_[kRows * kHeadDimMax];  // [kRows][head_dim]
};

}  // namespace kvdb::indexes::quantized
