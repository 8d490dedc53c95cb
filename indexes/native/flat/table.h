// The flat index's scan, in one instruction set.
#pragma once

#include "../nibbles.h"
#include "kernels.h"

namespace kvdb::indexes::flat {

template <class Isa>
struct FlatTable {
    using f32 = typename Isa::f32;
    using i32 = typename Isa::i32;
    static constexpr int kVectors = kKeyGroup / Isa::width;  // of 32-bit lanes for a group
    // Of a group: with fewer kept, reading these keys costs less than reading the group's low
    // plane.
    static constexpr int kRefineFrom = 4;
    static constexpr int kTogether = Isa::registers >= 32 && Isa::width == kKeyGroup ? 2 : 1;

    static int at_least(const std::uint16_t* lengths, std::uint16_t length, std::uint64_t* bits) {
        int count = 0;
        for (int w = 0; w < kChunkWords; ++w) {
            bits[w] &= Isa::at_least(lengths + 64 * w, length);
            count += __builtin_popcountll(bits[w]);
        }
        return count;
    }

    static void dot(const FlatTile& tile, const float* centre, int head_dim, float* out) {
        f32 sums[kTile] = {};
        for (int i = 0; i < head_dim; i += Isa::width) {
            const f32 c = load(centre + i, head_dim - i);
            KVDB_UNROLL
            for (int r = 0; r < kTile; ++r) {
                sums[r] = Isa::fma(c, load(tile.queries[r] + i, head_dim - i), sums[r]);
            }
        }
        KVDB_UNROLL
        for (int r = 0; r < kTile; ++r) out[r] = simd::sum_of_group<Isa, Isa::width>(sums[r])[0];
    }

    static void sieve(FlatSieve& item) {
        const FlatTile& tile = *item.scan.tile;
        const int head_dim = item.scan.head_dim;
        const int stride = FlatCodes::sign_bytes(head_dim);
        const Rows fixed = rows(item.scan.base) + rows(item.scan.slack);
        const Rows norm = rows(tile.norm) + rows(tile.error);
        const Rows step = rows(tile.step), middle = rows(tile.sum), least = rows(item.threshold);
        int kept = 0;
        for (int i = 0; i < item.count; ++i) {
            const std::uint8_t* signs = item.scan.signs + item.keys[i] * stride;
            const float scale = half(signs + head_dim / 8), error = half(signs + head_dim / 8 + 2);
            std::int32_t sums[kTile];
            Isa::template sum_chosen<kTile, kHeadDimMax>(
                signs, head_dim, reinterpret_cast<const std::int8_t*>(tile.packed), sums);
            RowsInt chosen;
            __builtin_memcpy(&chosen, sums, sizeof chosen);
            const Rows sum = 2 * __builtin_convertvector(chosen, Rows) - middle;
            const RowsInt pruned = fixed + step * scale * sum + norm * error < least;
            item.keys[kept] = item.keys[i];
            kept += !all(pruned);
        }
        item.count = kept;
    }

    static void prune(FlatPrune& item) {
        item.refined = 0;
        for (int w = 0; w < kChunkWords; ++w) item.kept[w] = 0;
        for (int first = 0; first < kChunkGroups; first += kTogether) {
            const std::uint64_t needed = item.groups >> first & ((1 << kTogether) - 1);
            if (!needed) continue;
            Sums high[kTogether];
            multiply(item.scan, item.scan.high, first, high);
            for (int g = 0; g < kTogether; ++g) {
                if (needed >> g & 1) prune_group(item, first + g, high[g]);
            }
        }
    }

    static void mass(FlatMass& item) {
        f32 estimates[kTile] = {}, bounds[kTile] = {};
        for (int first = 0; first < kChunkGroups; first += kTogether) {
            std::uint32_t any = 0;
            for (int g = first; g < first + kTogether; ++g) {
                for (int r = 0; r < kTile; ++r) any |= keys_of(item, r, g);
            }
            if (!any) continue;
            Sums high[kTogether], low[kTogether];
            multiply(item.scan, item.scan.high, first, high);
            multiply(item.scan, item.scan.low, first, low);
            for (int g = 0; g < kTogether; ++g) {
                add_mass(item, first + g, whole(high[g], low[g]), estimates, bounds);
            }
        }
        for (int r = 0; r < kTile; ++r) {
            item.estimate[r] += simd::sum_of_group<Isa, Isa::width>(estimates[r])[0];
            item.bound[r] += simd::sum_of_group<Isa, Isa::width>(bounds[r])[0];
        }
    }

    static constexpr FlatKernels kernels{at_least, dot, sieve, prune, mass};

  private:
    struct Estimate {
        f32 value, error;
    };
    struct Sums {  // over the codes of a group, for each row
        i32 of[kTile][kVectors];
    };

    KVDB_INLINE static void prune_group(FlatPrune& item, int group, const Sums& high) {
        std::uint64_t kept = keep(item, group, high, kHighError, 16, 120);
        if (__builtin_popcountll(kept) >= kRefineFrom) {
            ++item.refined;
            Sums low[1];
            multiply(item.scan, item.scan.low, group, low);
            kept = keep(item, group, whole(high, low[0]), kError, 1, 127.5f);
        }
        item.kept[group / 4] |= kept << (group % 4 * kKeyGroup);
    }

    KVDB_INLINE static std::uint32_t keys_of(const FlatMass& item, int r, int group) {
        return item.keys[r][group / 4] >> (group % 4 * kKeyGroup) & 0xffff;
    }

    // Adds what a group weighs.
    KVDB_INLINE static void add_mass(const FlatMass& item, int group, const Sums& sums,
                                     f32 (&estimates)[kTile], f32 (&bounds)[kTile]) {
        const float factor = item.scale * 1.44269504f;
        KVDB_UNROLL
        for (int r = 0; r < kTile; ++r) {
            const std::uint32_t keys = keys_of(item, r, group);
            KVDB_UNROLL
            for (int v = 0; v < kVectors; ++v) {
                const i32 set = bit_lanes(keys, v * Isa::width);
                const Estimate e =
                    estimate(item.scan, r, group, v, sums.of[r][v], kError, 1, 127.5f);
                const f32 cap = Isa::splat(item.cap[r]);
                // A bound that is NaN says nothing, but the cap still holds.
                const f32 value = e.value < cap ? e.value : cap;
                const f32 upper = e.value + e.error < cap ? e.value + e.error : cap;
                estimates[r] += masked(simd::exp2<Isa>((value - cap) * factor), set);
                bounds[r] += masked(simd::exp2<Isa>((upper - cap) * factor), set);
            }
        }
    }

    // A value of each row.
    typedef float Rows __attribute__((vector_size(4 * kTile)));
    typedef std::int32_t RowsInt __attribute__((vector_size(4 * kTile)));
    typedef std::int64_t RowsPairs __attribute__((vector_size(4 * kTile)));
    KVDB_INLINE static Rows rows(const float* from) {
        Rows x;
        __builtin_memcpy(&x, from, sizeof x);
        return x;
    }
    KVDB_INLINE static bool all(RowsInt mask) {
        const RowsPairs pairs = (RowsPairs)mask;
        return (pairs[0] & pairs[1]) == -1;
    }

    KVDB_INLINE static float half(const std::uint8_t* from) {
        std::uint16_t bits;
        __builtin_memcpy(&bits, from, sizeof bits);
        return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
    }

    // Elements of a row, zeros behind its end. head_dim is a multiple of 8.
    KVDB_INLINE static f32 load(const float* row, [[maybe_unused]] int left) {
        if constexpr (Isa::width > kHeadDimStep) {
            if (left < Isa::width) return Isa::widen_half(row);
        }
        return Isa::widen(row);
    }

    KVDB_INLINE static f32 masked(f32 x, i32 set) { return (f32)((i32)x & set); }

    // All ones in lane l where bit first + l is set.
    KVDB_INLINE static i32 bit_lanes(std::uint32_t bits, int first) {
        i32 lanes;
        KVDB_UNROLL
        for (int l = 0; l < Isa::width; ++l) lanes[l] = 1 << l;
        const i32 all = lanes & static_cast<std::int32_t>(bits >> first);
        return all == lanes;
    }

    KVDB_INLINE static i32 splat(std::int32_t x) {
        return (i32)Isa::splat(__builtin_bit_cast(float, x));
    }

    // The products of the rounded queries with one plane of the codes of groups [group, group +
    // count). Two groups keep the multipliers busy and share what is read of the queries.
    template <int count>
    KVDB_INLINE static void multiply(const FlatScan& scan, const std::uint8_t* plane, int group,
                                     Sums (&sums)[count]) {
        const int steps = scan.head_dim / 8;
        const int bytes = steps * kKeyGroup * 4;
        const std::uint8_t* codes = plane + std::int64_t{group} * bytes;
        KVDB_UNROLL
        for (int g = 0; g < count; ++g) sums[g] = {};
        for (int s = 0; s < steps; ++s) {
            i32 low[kTile], high[kTile];
            KVDB_UNROLL
            for (int r = 0; r < kTile; ++r) {
                low[r] = splat(scan.tile->packed[r][2 * s]);
                high[r] = splat(scan.tile->packed[r][2 * s + 1]);
            }
            KVDB_UNROLL
            for (int g = 0; g < count; ++g) {
                dot_codes<Isa>(codes + g * bytes + s * kKeyGroup * 4, low, high, sums[g].of);
            }
        }
    }

    // 16 times the high plane's and the low plane's.
    KVDB_INLINE static Sums whole(const Sums& high, const Sums& low) {
        Sums sums;
        KVDB_UNROLL
        for (int r = 0; r < kTile; ++r) {
            KVDB_UNROLL
            for (int v = 0; v < kVectors; ++v) sums.of[r][v] = high.of[r][v] * 16 + low.of[r][v];
        }
        return sums;
    }

    // Of q.k, from a sum over the codes; times `weight`, less `middle` for each dimension.
    KVDB_INLINE static Estimate estimate(const FlatScan& scan, int r, int group, int v, i32 sum,
                                         Length left, int weight, float middle) {
        const int at = group * kKeyGroup + v * Isa::width;
        const FlatTile& tile = *scan.tile;
        const f32 norm = length(scan, kNorm, at), scale = length(scan, kScale, at);
        const f32 error = length(scan, left, at);
        const f32 centred =
            __builtin_convertvector(sum * weight, f32) - Isa::splat(middle * tile.sum[r]);
        const f32 all = Isa::splat(tile.norm[r] + tile.error[r]);
        return {Isa::fma(centred * scale, Isa::splat(tile.step[r]), Isa::splat(scan.base[r])),
                Isa::fma(all, error,
                         Isa::fma(norm, Isa::splat(tile.error[r]), Isa::splat(scan.slack[r])))};
    }

    KVDB_INLINE static f32 length(const FlatScan& scan, Length which, int at) {
        return Isa::widen(reinterpret_cast<const BFloat16*>(scan.lengths + which * kChunk + at));
    }

    // The keys that some row may need. A bound that is NaN excludes nothing.
    KVDB_INLINE static std::uint64_t keep(FlatPrune& item, int group, const Sums& sums, Length left,
                                          int weight, float middle) {
        std::uint64_t kept = 0;
        KVDB_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            i32 pruned = splat(-1);
            KVDB_UNROLL
            for (int r = 0; r < kTile; ++r) {
                const Estimate e =
                    estimate(item.scan, r, group, v, sums.of[r][v], left, weight, middle);
                const f32 upper = e.value + e.error;
                Isa::store(item.upper[r] + group * kKeyGroup + v * Isa::width, upper);
                pruned &= upper < Isa::splat(item.threshold[r]);
            }
            kept |= std::uint64_t{Isa::clear_lanes(pruned)} << (v * Isa::width);
        }
        return kept;
    }
};

}  // namespace kvdb::indexes::flat
