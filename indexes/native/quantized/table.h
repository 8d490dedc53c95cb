// Reading codes of keys and values, in one instruction set.
#pragma once

#include "../nibbles.h"
#include "kernels.h"
#include "tile_dots.h"

namespace kvdb::indexes::quantized {

template <class Isa>
struct QuantizedTable {
    using f32 = typename Isa::f32;
    using i32 = typename Isa::i32;
    using i8 = typename simd::Vector<std::int8_t, Isa::width>::type;
    static constexpr int kVectors = kGroup / Isa::width;            // of strata
    static constexpr int kRunVectors = kRun / Isa::width;           // of a run's tokens
    static constexpr int kTogether = Isa::registers >= 32 ? 4 : 2;  // of these
    static constexpr int kSlice = Isa::registers >= 32 ? 4 : 2;  // vectors of dimensions at a time

    static constexpr int kTiledRowsMin = 8;  // with fewer, most of a tile of queries is empty

    // Puts down the scores of a vector of tokens, from t on, for a row. sums: their products.
    KVDB_INLINE static void put(const ScanItem& item, int r, int t, i32 sums, f32 scale) {
        const RoundedQuery& query = *item.query[r];
        const f32 middle = Isa::splat(kCodeMiddle * query.sum);
        const f32 dot = __builtin_convertvector(sums, f32) - middle;
        const f32 score = Isa::fma(dot * Isa::splat(query.step), scale, Isa::splat(item.base[r]));
        Isa::store(item.scores[r] + t, score);
        float* most = item.largest[r] + t / kBlock * kGroup + t % kGroup;
        Isa::store(most, Isa::max(Isa::widen(most), score));
    }

    KVDB_INLINE static f32 key_scales(const ScanItem& item, int t) {
        return Isa::widen(reinterpret_cast<const BFloat16*>(item.codes.scales) + t);
    }

    // Scores of kTogether vectors of a run's tokens, from `part` on, for rows from `row` on.
    template <int rows>
    KVDB_INLINE static void scan_part(const ScanItem& item, int row, int run, int part) {
        const int d = item.codes.head_dim;
        i32 sums[rows][kTogether] = {};
        const std::uint8_t* at =
            item.codes.keys + std::int64_t{run} * d * kRun / 2 + part * Isa::width * 4;
        for (int i = 0; i < d / 4; i += 2, at += 4 * kRun) {
            i32 first[rows], second[rows];
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) {
                first[r] = i32{} + item.query[row + r]->packed[i];
                second[r] = i32{} + item.query[row + r]->packed[i + 1];
            }
            dot_codes<Isa>(at, first, second, sums);
        }
        KVDB_UNROLL
        for (int v = 0; v < kTogether; ++v) {
            const int t = run * kRun + (part + v) * Isa::width;
            const f32 scale = key_scales(item, t);
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) put(item, row + r, t, sums[r][v], scale);
        }
    }

    template <int rows>
    static void scan_rows(const ScanItem& item, int row) {
        for (int run = 0; run < item.runs; ++run) {
            for (int part = 0; part < kRunVectors; part += kTogether) {
                scan_part<rows>(item, row, run, part);
            }
        }
    }

    static void scan_by_tiles(const ScanItem& item)
        requires Isa::has_tiles
    {
        const TileDots<Isa> dots(item);
        typename Isa::Tiles tiles;
        alignas(64) std::int32_t sums[kScanRows * Isa::width];
        for (int run = 0; run < item.runs; ++run) {
            for (int first = 0; first < kRun; first += Isa::width) {
                dots.dots(tiles, run, first, sums);
                const int t = run * kRun + first;
                const f32 scale = key_scales(item, t);
                for (int r = 0; r < item.rows; ++r) {
                    put(item, r, t, Isa::template load<i32>(sums + r * Isa::width), scale);
                }
            }
        }
    }

    static void scan(const ScanItem& item) {
        if constexpr (Isa::has_tiles) {
            if (item.rows >= kTiledRowsMin && TileDots<Isa>::takes(item.codes)) {
                return scan_by_tiles(item);
            }
        }
        int row = 0;
        for (; row + 4 <= item.rows; row += 4) scan_rows<4>(item, row);
        switch (item.rows - row) {
            case 3: return scan_rows<3>(item, row);
            case 2: return scan_rows<2>(item, row);
            case 1: return scan_rows<1>(item, row);
        }
    }

    // Token j of stratum s of a block of tokens is token s + kGroup * j.
    static void largest(const float* scores, float* out) {
        for (int block = 0; block < kChunk / kBlock; ++block, scores += kBlock, out += kGroup) {
            KVDB_UNROLL
            for (int v = 0; v < kVectors; ++v) {
                f32 most = Isa::widen(scores + v * Isa::width);
                for (int j = 1; j < kBlock / kGroup; ++j) {
                    most = Isa::max(most, Isa::widen(scores + j * kGroup + v * Isa::width));
                }
                Isa::store(out + v * Isa::width, most);
            }
        }
    }

    static float most(const float* values, std::int64_t count) {
        f32 most = Isa::splat(-__builtin_inff());
        for (std::int64_t i = 0; i < count; i += Isa::width) {
            most = Isa::max(most, Isa::widen(values + i));
        }
        return simd::max_of_group<Isa, Isa::width>(most)[0];
    }

    static std::int64_t count(const float* values, std::int64_t count, float least) {
        i32 found{};
        for (std::int64_t i = 0; i < count; i += Isa::width) {
            found -= Isa::widen(values + i) >= Isa::splat(least);
        }
        std::int64_t sum = 0;
        for (int lane = 0; lane < Isa::width; ++lane) sum += found[lane];
        return sum;
    }

    static std::int64_t collect(const float* values, std::int64_t count, float least,
                                std::int32_t* out) {
        std::int64_t found = 0;
        for (std::int64_t i = 0; i < count; i += Isa::width) {
            const i32 below = Isa::widen(values + i) < Isa::splat(least);
            for (std::uint32_t bits = Isa::clear_lanes(below); bits; bits &= bits - 1) {
                out[found++] = static_cast<std::int32_t>(i + __builtin_ctz(bits));
            }
        }
        return found;
    }

    // The weights of a run as bytes, token after token. Returns what one stands for, and in `sum`
    // their sum. Rounding adds what differs from lane to lane, so that small weights beside a large
    // one are kept on average.
    KVDB_INLINE static float weigh(const SumItem& item, int r, int run, std::int8_t* bytes,
                                   float& sum, f32& mass) {
        f32 weights[kRunVectors], most{}, part{};
        const f32 reference = Isa::splat(item.reference[r]), factor = Isa::splat(item.factor);
        const std::uint16_t* scales = item.codes.scales + kChunk + run * kRun;
        KVDB_UNROLL
        for (int v = 0; v < kRunVectors; ++v) {
            const float* scores = item.scores[r] + run * kRun + v * Isa::width;
            const f32 x = simd::exp2<Isa>((Isa::widen(scores) - reference) * factor);
            part += x;
            weights[v] = x * Isa::widen(reinterpret_cast<const BFloat16*>(scales) + v * Isa::width);
            most = Isa::max(most, weights[v]);
        }
        mass += part;
        if (!item.values[r]) return 0;
        if (simd::sum_of_group<Isa, Isa::width>(part)[0] < item.least[r]) return 0;
        const float largest = simd::max_of_group<Isa, Isa::width>(most)[0];
        if (!(largest > 1e-30f) || !(largest < 1e30f)) return 0;
        const f32 inverse = Isa::splat(kWeightMax / largest);
        f32 dither;
        KVDB_UNROLL
        for (int i = 0; i < Isa::width; ++i) {
            dither[i] = (static_cast<float>(i * 5 % Isa::width) + 0.5f) / Isa::width;
        }
        i32 total{};
        KVDB_UNROLL
        for (int v = 0; v < kRunVectors; ++v) {
            const i32 rounded = __builtin_convertvector(Isa::fma(weights[v], inverse, dither), i32);
            total += rounded;
            Isa::store(bytes + v * Isa::width, __builtin_convertvector(rounded, i8));
        }
        sum = simd::sum_of_group<Isa, Isa::width>(__builtin_convertvector(total, f32))[0];
        return largest / kWeightMax;
    }

    // Adds the values of a run, `vectors` of dimensions from `first` on.
    template <int rows, int vectors>
    KVDB_INLINE static void add_slice(const SumItem& item, int run, int first,
                                      const std::int8_t (*bytes)[kRun], const float* unit,
                                      const float* sum) {
        const int slice = first / kSliceDims * kSliceDims;  // that it lies in
        const int dims = Codes::value_dims(item.codes.head_dim);
        const int width = dims - slice < kSliceDims ? dims - slice : kSliceDims;
        i32 sums[rows][vectors] = {};
        const std::uint8_t* at = item.codes.values + std::int64_t{run} * kRun / 2 * dims +
                                 slice * kRun / 2 + (first - slice) * 4;
        for (int u = 0; u < kRun; u += kUnit, at += width * 4) {
            i32 first_four[rows], last_four[rows];
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) {
                std::int32_t four;
                __builtin_memcpy(&four, bytes[r] + u, 4);
                first_four[r] = i32{} + four;
                __builtin_memcpy(&four, bytes[r] + u + 4, 4);
                last_four[r] = i32{} + four;
            }
            dot_codes<Isa>(at, first_four, last_four, sums);
        }
        KVDB_UNROLL
        for (int r = 0; r < rows; ++r) {
            if (unit[r] == 0) continue;
            const f32 middle = Isa::splat(kCodeMiddle * sum[r]), scale = Isa::splat(unit[r]);
            KVDB_UNROLL
            for (int v = 0; v < vectors; ++v) {
                float* to = item.values[r] + first + v * Isa::width;
                const f32 value = __builtin_convertvector(sums[r][v], f32) - middle;
                Isa::store(to, Isa::fma(value, scale, Isa::widen(to)));
            }
        }
    }

    // All weights come first, because those of one run wait for their largest, and those of the
    // next need not wait for them.
    template <int rows>
    static void sum_rows(SumItem& item) {
        const int dims = Codes::value_dims(item.codes.head_dim);
        for (int i = 0; i < kPrefetchBytes; i += 64) __builtin_prefetch(item.codes.values + i);
        std::int8_t bytes[kRuns][rows][kRun];
        float unit[kRuns][rows], sum[kRuns][rows];
        f32 mass[rows] = {};
        for (int run = 0; run < item.runs; ++run) {
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) {
                sum[run][r] = 0;
                unit[run][r] = weigh(item, r, run, bytes[run][r], sum[run][r], mass[r]);
                if (unit[run][r] == 0) __builtin_memset(bytes[run][r], 0, kRun);
            }
        }
        for (int run = 0; run < item.runs; ++run) {
            float most = 0;
            for (int r = 0; r < rows; ++r) most += unit[run][r];
            if (most == 0) continue;
            int first = 0;
            for (; first + kSlice * Isa::width <= dims; first += kSlice * Isa::width) {
                add_slice<rows, kSlice>(item, run, first, bytes[run], unit[run], sum[run]);
            }
            for (; first < dims; first += Isa::width) {
                add_slice<rows, 1>(item, run, first, bytes[run], unit[run], sum[run]);
            }
        }
        for (int r = 0; r < rows; ++r) {
            item.mass[r] = simd::sum_of_group<Isa, Isa::width>(mass[r])[0];
        }
    }

    static void sum(SumItem& item) {
        switch (item.rows) {
            case 1: return sum_rows<1>(item);
            case 2: return sum_rows<2>(item);
            case 3: return sum_rows<3>(item);
            default: return sum_rows<4>(item);
        }
    }

    static constexpr QuantizedKernels kernels{scan, largest, sum, most, count, collect};
};

}  // namespace kvdb::indexes::quantized
