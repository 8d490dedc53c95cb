// The way of a decode item through its tokens.
//
// An item takes all KV heads of its blocks, tile by tile, so that memory is read in order, in two
// streams: keys and values. (Head by head, the hardware's prefetchers and the TLB would start anew
// every 16 KiB, which halves the bandwidth of one core.)
#pragma once

#include "gathered.h"
#include "kernels.h"
#include "operand.h"

namespace kvdb::kernels {

inline constexpr int kDecodeGroups = 4;
using DecodeTile = Tile<kDecodeGroups>;

// `Self` has load_queries(view), which is called when a tile is of another view than the one
// before, and attend(tile, loaded, next, head), where `next` is what comes next if it is a whole
// tile.
template <class Self, class Isa, class T>
class DecodeWalk {
  protected:
    using Loaded = Gathered<Isa, T, kDecodeGroups>;

    explicit DecodeWalk(const AttendItem& item) : item_(item) {}

    // `gathered` has room for two Loaded.
    void walk(T* gathered) {
        Self& self = static_cast<Self&>(*this);
        const std::int64_t last_seen = visible(item_, item_.row_end - 1);
        RunCursor cursor(item_.geometry, item_.run, item_.block, item_.token_begin,
                         item_.token_end < last_seen ? item_.token_end : last_seen);
        DecodeTile tiles[2];
        cursor.next(tiles[0]);
        if (tiles[0].count == 0) return;
        std::int32_t view = -1;
        int step = 0;
        Loaded loaded = load(tiles[0], 0, step, gathered);
        for (int i = 0; tiles[i].count > 0; i ^= 1) {
            cursor.next(tiles[i ^ 1]);
            if (tiles[i].view != view) self.load_queries(view = tiles[i].view);
            for (int head = 0; head < item_.heads; ++head) {
                const bool last = head + 1 == item_.heads;
                const DecodeTile& ahead = tiles[last ? i ^ 1 : i];
                const Loaded next = load(ahead, last ? 0 : head + 1, ++step, gathered);
                const bool prefetch = ahead.count == DecodeTile::tokens_max;
                self.attend(tiles[i], loaded, prefetch ? &next : nullptr, head);
                loaded = next;
            }
        }
    }

    const AttendItem& item_;

  private:
    // Two tiles are loaded at a time, the one in use and the next.
    Loaded load(const DecodeTile& tile, int head, int step, T* gathered) const {
        return Loaded(item_.geometry, tile, item_.kv_head + head,
                      gathered + step % 2 * Loaded::scratch_elements(item_.geometry));
    }
};

}  // namespace kvdb::kernels
