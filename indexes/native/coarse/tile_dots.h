// Products of byte codes with up to 16 rows of queries at once, by matrix tiles.
#pragma once

#include <cstring>

#include "kernels.h"
#include "simd/generic.h"

namespace kvdb::indexes::coarse {

// The codes of 16 pages lie as a tile's right factor does: four dimensions of each page to a row.
template <class Isa>
    requires Isa::has_tiles
class TileDots {
  public:
    static constexpr int kRows = simd::kTileRows, kTileBytes = 4 * simd::kTileLanes;
    static_assert(kPageGroup == simd::kTileLanes);

    // Whether they are whole tiles: what lies behind the last codes must not be read.
    static bool takes(const Codes& codes) {
        return codes.dims % kTileBytes == 0 && codes.dims <= kDimsMax;
    }

    // Of `count` rows, from `row` on; `query` picks the one for these codes.
    TileDots(const Codes& codes, const ScanRow* row, int count, ByteQuery ScanRow::* query)
        : codes_(codes) {
        std::memset(queries_, 0, sizeof queries_);
        for (int r = 0; r < count; ++r) {
            std::memcpy(queries_ + r * codes.dims, (row[r].*query).bytes, codes.dims);
        }
    }

    // sums: [kRows][kPageGroup], of the pages of a group.
    void dots(typename Isa::Tiles& tiles, std::int64_t group, std::int32_t* sums) const {
        const std::uint8_t* at = codes_.codes + group * codes_.dims * kPageGroup;
        tiles.template zero<0>();
        for (int d = 0; d < codes_.dims; d += kTileBytes, at += kTileBytes * kPageGroup) {
            tiles.template load<1>(queries_ + d, codes_.dims);
            tiles.template load<2>(at, kTileBytes);
            tiles.template dot_bytes<0, 1, 2>();
        }
        tiles.template store<0>(sums, kTileBytes);
    }

  private:
    static constexpr int kDimsMax = 2 * kHeadDimMax;

    const Codes& codes_;
    alignas(64) std::int8_t queries_[kRows * kDimsMax];  // [kRows][dims]
};

}  // namespace kvdb::indexes::coarse
