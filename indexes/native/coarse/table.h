// Representatives of pages, in one instruction set.
// size: one table of kernels, which share what is at its top.
#pragma once

#include "kernels.h"
#include "simd/generic.h"
#include "tile_dots.h"

namespace kvdb::indexes::coarse {

template <class Isa>
struct CoarseTable {
    using f32 = typename Isa::f32;
    using i32 = typename Isa::i32;
    using u32 = typename Isa::u32;
    static constexpr int kParts = kPageGroup / Isa::width;  // vectors that hold a group
    // Independent sums for each of them, so that one does not wait for the other.
    static constexpr int kChains = kParts == 1 ? 2 : 1;
    static constexpr float kNone = -__builtin_inff();
    static constexpr int kTiledRowsMin = 8;  // with fewer, most of a tile of queries is empty

    // c + the products of the four bytes of each lane, unsigned, with four signed bytes.
    KVDB_INLINE static i32 dot_bytes(u32 a, std::int32_t four, i32 c) {
        if constexpr (requires(i32 v) { Isa::dot_bytes(v, v, v); }) {
            return Isa::dot_bytes((i32)a, i32{} + four, c);
        } else {
            KVDB_UNROLL
            for (int j = 0; j < 4; ++j) {
                c += (i32)((a >> (8 * j)) & 255) * static_cast<std::int8_t>(four >> (8 * j));
            }
            return c;
        }
    }

    template <int rows>
    struct Sums {
        i32 of[rows][kParts];
    };

    // Products of one group's codes with `rows` queries, of which `query` picks the one for these
    // codes.
    template <int rows>
    KVDB_INLINE static Sums<rows> dots(const Codes& codes, std::int64_t group, const ScanRow* row,
                                       ByteQuery ScanRow::* query) {
        i32 sums[kChains][rows][kParts] = {};
        const std::uint8_t* at = codes.codes + group * codes.dims * kPageGroup;
        for (int i = 0; i < codes.dims; i += 4 * kChains) {
            KVDB_UNROLL
            for (int c = 0; c < kChains; ++c, at += 4 * kPageGroup) {
                KVDB_UNROLL
                for (int p = 0; p < kParts; ++p) {
                    const u32 four_each = Isa::template load<u32>(at + p * Isa::width * 4);
                    KVDB_UNROLL
                    for (int r = 0; r < rows; ++r) {
                        std::int32_t four;
                        __builtin_memcpy(&four, (row[r].*query).bytes + i + 4 * c, 4);
                        sums[c][r][p] = dot_bytes(four_each, four, sums[c][r][p]);
                    }
                }
            }
        }
        Sums<rows> all;
        KVDB_UNROLL
        for (int r = 0; r < rows; ++r) {
            KVDB_UNROLL
            for (int p = 0; p < kParts; ++p) {
                all.of[r][p] = sums[0][r][p];
                if constexpr (kChains == 2) all.of[r][p] += sums[1][r][p];
            }
        }
        return all;
    }

    // Scores of one group from such products.
    template <int rows>
    KVDB_INLINE static void scores(const Codes& codes, std::int64_t group, const ScanRow* row,
                                   ByteQuery ScanRow::* query, const Sums<rows>& sums,
                                   f32 (*out)[kParts]) {
        KVDB_UNROLL
        for (int p = 0; p < kParts; ++p) {
            const f32 scale = Isa::widen(codes.scales + group * kPageGroup + p * Isa::width);
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) {
                const i32 sum = sums.of[r][p] + (row[r].*query).start;
                out[r][p] =
                    __builtin_convertvector(sum, f32) * scale * Isa::splat((row[r].*query).scale);
            }
        }
    }

    // NaN has no order: a page of such a priority comes first.
    KVDB_INLINE static f32 ordered(f32 priority) {
        return priority == priority ? priority : Isa::splat(-kNone);
    }

    // What a scan keeps of all groups that it has seen, in registers while it goes from one to the
    // next.
    template <int rows>
    struct Seen {
        f32 middle[rows][kParts], reach[rows][kParts], squares[rows][kParts];

        KVDB_INLINE explicit Seen(const ScanRow* row) {
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) {
                KVDB_UNROLL
                for (int p = 0; p < kParts; ++p) {
                    middle[r][p] = Isa::widen(row[r].most + p * Isa::width);
                    reach[r][p] = Isa::widen(row[r].most + kPageGroup + p * Isa::width);
                    squares[r][p] = Isa::widen(row[r].squares + p * Isa::width);
                }
            }
        }
        KVDB_INLINE void store(ScanRow* row) const {
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) {
                KVDB_UNROLL
                for (int p = 0; p < kParts; ++p) {
                    Isa::store(row[r].most + p * Isa::width, middle[r][p]);
                    Isa::store(row[r].most + kPageGroup + p * Isa::width, reach[r][p]);
                    Isa::store(row[r].squares + p * Isa::width, squares[r][p]);
                }
            }
        }
    };

    // centers: the products with the centers' codes.
    template <int rows>
    KVDB_INLINE static void scan_group(const ScanItem& item, std::int64_t group, ScanRow* row,
                                       const Sums<rows>& centers, Seen<rows>& all) {
        f32 center[rows][kParts], radius[rows][kParts] = {}, farthest[rows][kParts];
        scores<rows>(item.center, group, row, &ScanRow::center, centers, center);
        if (item.radius.codes) {
            scores<rows>(item.radius, group, row, &ScanRow::radius,
                         dots<rows>(item.radius, group, row, &ScanRow::radius), radius);
        }
        if (item.farthest.codes) {
            scores<rows>(item.farthest, group, row, &ScanRow::farthest,
                         dots<rows>(item.farthest, group, row, &ScanRow::farthest), farthest);
        }
        KVDB_UNROLL
        for (int r = 0; r < rows; ++r) {
            f32 best = Isa::splat(kNone);
            KVDB_UNROLL
            for (int p = 0; p < kParts; ++p) {
                const std::int64_t at = group * kPageGroup + p * Isa::width;
                const auto seen = Isa::widen(row[r].count + at) > 0.0f;
                const f32 middle = center[r][p] + row[r].base;
                const f32 reach = radius[r][p] + row[r].slack;
                f32 priority = Isa::fma(reach, Isa::splat(item.margin), middle);
                if (item.farthest.codes) {
                    priority = Isa::max(priority, farthest[r][p] + row[r].base);
                }
                const f32 none = Isa::splat(kNone);
                Isa::store(row[r].middle + at, seen ? middle : none);
                Isa::store(row[r].reach + at, reach);
                if (row[r].priority) Isa::store(row[r].priority + at, seen ? priority : none);
                all.middle[r][p] = Isa::max(all.middle[r][p], seen ? middle : none);
                all.reach[r][p] = Isa::max(all.reach[r][p], reach);
                all.squares[r][p] =
                    Isa::fma(reach * reach, Isa::widen(row[r].count + at), all.squares[r][p]);
                best = Isa::max(best, seen ? ordered(priority) : none);
            }
            row[r].best[group] = simd::max_of_group<Isa, Isa::width>(best)[0];
        }
    }

    // All groups for the rows from `row` on.
    template <int rows>
    static void scan_all(const ScanItem& item, ScanRow* row) {
        Seen<rows> all(row);
        for (std::int64_t group = 0; group < item.groups; ++group) {
            scan_group<rows>(item, group, row,
                             dots<rows>(item.center, group, row, &ScanRow::center), all);
        }
        all.store(row);
    }

    static void scan(const ScanItem& item) {
        if constexpr (Isa::has_tiles) {
            if (item.count >= kTiledRowsMin && TileDots<Isa>::takes(item.center)) {
                scan_by_tiles(item);
                return;
            }
        }
        int r = 0;
        for (; r + 4 <= item.count; r += 4) scan_all<4>(item, item.rows + r);
        for (; r < item.count; ++r) scan_all<1>(item, item.rows + r);
    }

    // One group of pages whose products with the rows' centers a tile holds, from `begin` on.
    template <int rows>
    KVDB_INLINE static void scan_tile(const ScanItem& item, std::int64_t group, ScanRow* row,
                                      const std::int32_t* sums) {
        Sums<rows> of;
        KVDB_UNROLL
        for (int i = 0; i < rows; ++i) of.of[i][0] = Isa::template load<i32>(sums + i * kPageGroup);
        Seen<rows> all(row);
        scan_group<rows>(item, group, row, of, all);
        all.store(row);
    }

    static void scan_by_tiles(const ScanItem& item)
        requires Isa::has_tiles
    {
        using Dots = TileDots<Isa>;
        typename Isa::Tiles tiles;
        alignas(64) std::int32_t sums[Dots::kRows * kPageGroup];
        for (int begin = 0; begin < item.count; begin += Dots::kRows) {
            const int end = begin + Dots::kRows < item.count ? begin + Dots::kRows : item.count;
            const Dots dots(item.center, item.rows + begin, end - begin, &ScanRow::center);
            for (std::int64_t group = 0; group < item.groups; ++group) {
                dots.dots(tiles, group, sums);
                int r = begin;
                for (; r + 4 <= end; r += 4) {
                    scan_tile<4>(item, group, item.rows + r, sums + (r - begin) * kPageGroup);
                }
                for (; r < end; ++r) {
                    scan_tile<1>(item, group, item.rows + r, sums + (r - begin) * kPageGroup);
                }
            }
        }
    }

    static std::uint32_t reaching(const ReachItem& item) {
        std::uint32_t pages = 0;
        KVDB_UNROLL
        for (int i = 0; i < kPageGroup; i += Isa::width) {
            const f32 priority = item.priority
                                     ? Isa::widen(item.priority + i)
                                     : Isa::fma(Isa::widen(item.reach + i), Isa::splat(item.margin),
                                                Isa::widen(item.middle + i));
            const auto below = priority < Isa::splat(item.threshold);
            pages |= std::uint32_t{Isa::clear_lanes((i32)below)} << i;
        }
        return pages;
    }

    // A page without weight may lie far above the reference.
    KVDB_INLINE static f32 power(f32 x) {
        const f32 limit = Isa::splat(1.0f);
        return simd::exp2<Isa>(x > limit ? limit : x);
    }

    // The score around which most of the mass of a page's tokens lies.
    KVDB_INLINE static f32 likely_score(const MassItem& item, f32 middle, f32 reach) {
        const f32 around = Isa::splat(item.curve) * reach * reach;
        return middle + (around < reach ? around : reach);
    }

    // A multiple of kPageGroup pages.
    static float likely(const MassItem& item) {
        const f32 none = Isa::splat(kNone);
        f32 most = none;
        for (std::int64_t i = 0; i < item.count; i += Isa::width) {
            const f32 middle = Isa::widen(item.middle + i), reach = Isa::widen(item.reach + i);
            const auto weighs = Isa::widen(item.weights + i) > 0.0f;
            most = Isa::max(weighs ? likely_score(item, middle, reach) : none, most);
        }
        return simd::max_of_group<Isa, Isa::width>(most)[0] * item.factor;
    }

    static void mass(MassItem& item) {
        f32 total{}, estimate{}, bound{}, each_total{};
        const f32 factor = Isa::splat(item.factor), share = Isa::splat(item.share);
        const f32 likely_reference = Isa::splat(-item.likely_reference);
        const f32 bound_reference = Isa::splat(-item.bound_reference);
        for (std::int64_t i = 0; i < item.count; i += Isa::width) {
            const f32 middle = Isa::widen(item.middle + i), reach = Isa::widen(item.reach + i);
            const f32 x = likely_score(item, middle, reach), y = middle + reach;
            const f32 weights = Isa::widen(item.weights + i);
            total += weights;
            const f32 likely = power(Isa::fma(x, factor, likely_reference)) * weights;
            estimate += likely;
            if (item.each) {
                const f32 each = Isa::fma(likely, share, Isa::widen(item.each + i));
                Isa::store(item.each + i, each);
                each_total += each;
            }
            bound = Isa::fma(power(Isa::fma(y, factor, bound_reference)), weights, bound);
        }
        item.total = item.estimate = item.bound = item.each_total = 0;
        for (int j = 0; j < Isa::width; ++j) {
            item.total += total[j];
            item.estimate += estimate[j];
            item.bound += bound[j];
            item.each_total += each_total[j];
        }
    }

    static void sift(SiftItem& item) {
        constexpr int width = Isa::width;
        const f32 threshold = Isa::splat(item.threshold), factor = Isa::splat(item.factor);
        const f32 reference = Isa::splat(item.reference), none{};
        std::int64_t candidates = 0;
        double total = 0;
        f32 sum{};
        std::int64_t i = 0;
        for (; i + width <= item.count; i += width) {
            const f32 score = Isa::widen(item.scores + i);
            const auto candidate = score >= threshold;
            const f32 below = power((score - reference) * factor);
            const f32 other = candidate ? none : below;
            sum += other;
            if (item.below) Isa::store(item.below + i, other);
            if (simd::max_of_group<Isa, width>(score)[0] < item.threshold) continue;
            for (int j = 0; j < width; ++j) {
                item.candidates[candidates] = static_cast<std::int32_t>(i + j);
                candidates += item.scores[i + j] >= item.threshold && item.scores[i + j] > kNone;
            }
        }
        for (; i < item.count; ++i) {
            const float score = item.scores[i];
            float other = 0;
            if (score >= item.threshold && score > kNone) {
                item.candidates[candidates++] = static_cast<std::int32_t>(i);
            } else if (score > kNone) {
                other = power(Isa::splat((score - item.reference) * item.factor))[0];
            }
            total += other;
            if (item.below) item.below[i] = other;
        }
        for (int j = 0; j < width; ++j) total += sum[j];
        item.candidate_count = candidates;
        item.others = total;
    }

    // Register tile: `tokens` vectors x by `vectors` of centroids.
    template <int tokens, int vectors>
    KVDB_INLINE static void nearest(const AssignItem& item, std::int64_t t) {
        constexpr int width = Isa::width;
        f32 best[tokens];
        i32 which[tokens] = {};
        i32 lane;
        for (int j = 0; j < width; ++j) lane[j] = j;
        KVDB_UNROLL
        for (int r = 0; r < tokens; ++r) best[r] = Isa::splat(-kNone);
        constexpr int step = vectors * width;
        for (std::int64_t c = 0; c < item.clusters; c += step) {
            f32 sums[tokens][vectors] = {};
            for (int i = 0; i < item.dims; ++i) {
                f32 centroid[vectors];
                KVDB_UNROLL
                for (int v = 0; v < vectors; ++v) {
                    const std::int64_t at = c + v * width;
                    centroid[v] =
                        Isa::widen(item.centroids + (at / kPageGroup * item.dims + i) * kPageGroup +
                                   at % kPageGroup);
                }
                KVDB_UNROLL
                for (int r = 0; r < tokens; ++r) {
                    const f32 x = Isa::splat(item.x[(t + r) * item.dims + i]);
                    KVDB_UNROLL
                    for (int v = 0; v < vectors; ++v) {
                        sums[r][v] = Isa::fma(x, centroid[v], sums[r][v]);
                    }
                }
            }
            KVDB_UNROLL
            for (int v = 0; v < vectors; ++v) {
                const f32 half = Isa::widen(item.halves + c + v * width);
                const i32 number = lane + static_cast<std::int32_t>(c + v * width);
                KVDB_UNROLL
                for (int r = 0; r < tokens; ++r) {
                    const f32 distance = half - sums[r][v];
                    const auto nearer = distance < best[r];
                    best[r] = nearer ? distance : best[r];
                    which[r] = nearer ? number : which[r];
                }
            }
        }
        for (int r = 0; r < tokens; ++r) {
            int at = 0;
            for (int j = 1; j < width; ++j) {
                if (best[r][j] < best[r][at]) at = j;
            }
            item.nearest[t + r] = which[r][at];
            item.distances[t + r] = best[r][at];
        }
    }

    // `clusters` is a multiple of 4 * kPageGroup.
    static void assign(const AssignItem& item) {
        std::int64_t t = 0;
        for (; t + Isa::tile_rows <= item.count; t += Isa::tile_rows) {
            nearest<Isa::tile_rows, Isa::tile_vectors>(item, t);
        }
        for (; t < item.count; ++t) nearest<1, Isa::tile_vectors>(item, t);
    }

    // Dimensions that are summed up at a time, in registers.
    static constexpr int kBlendVectors = Isa::registers >= 32 ? 4 : 2;

    // Elements [i, i + width) of values, zeros behind their end.
    KVDB_INLINE static f32 load(const BFloat16* values, int i, [[maybe_unused]] int dims) {
        if constexpr (Isa::width > kHeadDimStep) {
            if (i + Isa::width > dims) return i < dims ? Isa::widen_half(values + i) : f32{};
        } else {
            if (i >= dims) return f32{};
        }
        return Isa::widen(values + i);
    }

    // Dimensions from `first` on, for `rows` rows.
    template <int rows, bool whole>
    KVDB_INLINE static void blend_step(const BlendItem& item, int row, int first) {
        constexpr int step = kBlendVectors * Isa::width;
        f32 sums[rows][kBlendVectors] = {};
        const float* weights = item.weights + row * item.count;
        for (std::int64_t p = 0; p < item.count; ++p) {
            float most = 0;
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) most += weights[r * item.count + p];
            if (most == 0) continue;  // none is negative
            f32 value[kBlendVectors];
            KVDB_UNROLL
            for (int v = 0; v < kBlendVectors; ++v) {
                const BFloat16* values = item.values + p * item.dims;
                const int at = first + v * Isa::width;
                value[v] = whole ? Isa::widen(values + at) : load(values, at, item.dims);
            }
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) {
                const f32 weight = Isa::splat(weights[r * item.count + p]);
                KVDB_UNROLL
                for (int v = 0; v < kBlendVectors; ++v) {
                    sums[r][v] = Isa::fma(weight, value[v], sums[r][v]);
                }
            }
        }
        for (int r = 0; r < rows; ++r) {
            float lanes[step];
            for (int v = 0; v < kBlendVectors; ++v) Isa::store(lanes + v * Isa::width, sums[r][v]);
            float* out = item.out + (row + r) * item.dims + first;
            for (int i = 0; i < step && first + i < item.dims; ++i) out[i] += lanes[i];
        }
    }

    template <int rows>
    static void blend_rows(const BlendItem& item, int row) {
        constexpr int step = kBlendVectors * Isa::width;
        int i = 0;
        for (; i + step <= item.dims; i += step) blend_step<rows, true>(item, row, i);
        if (i < item.dims) blend_step<rows, false>(item, row, i);
    }

    static void blend(const BlendItem& item) {
        int row = 0;
        for (; row + 4 <= item.rows; row += 4) blend_rows<4>(item, row);
        for (; row + 2 <= item.rows; row += 2) blend_rows<2>(item, row);
        for (; row < item.rows; ++row) blend_rows<1>(item, row);
    }

    static constexpr CoarseKernels kernels{scan, reaching, likely, mass, sift, assign, blend};
};

}  // namespace kvdb::indexes::coarse
