// Exact scores, in one instruction set. Sums are float32.
#pragma once

#include "kernels.h"
#include "simd/coded_row.h"
#include "simd/generic.h"

namespace kvdb::indexes {

template <class Isa>
struct ScoreTable {
    using f32 = typename Isa::f32;
    static constexpr int kAhead = 8;                      // tokens whose keys are on their way
    static constexpr int kCodesAhead = 3;                 // tokens whose codes are
    static constexpr int kRowsMax = 8;                    // queries that are rotated together
    static constexpr int kTogether = 4;                   // queries
    static constexpr int kKeys = Isa::width / kTogether;  // by which so many sums fill a vector

    // Elements [i, i + width) of a row, zeros behind its end. head_dim is a multiple of 8.
    template <class T>
    KVDB_INLINE static f32 load(const T* row, int i, [[maybe_unused]] int head_dim) {
        if constexpr (Isa::width > kHeadDimStep) {
            if (i + Isa::width > head_dim) return Isa::widen_half(row + i);
        }
        return Isa::widen(row + i);
    }

    template <class T, int rows>
    KVDB_INLINE static void dots(const T* key, const float* queries, int head_dim, float* out,
                                 std::int64_t stride) {
        f32 sums[rows] = {};
        for (int i = 0; i < head_dim; i += Isa::width) {
            const f32 k = load(key, i, head_dim);
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) {
                sums[r] = Isa::fma(k, load(queries + r * head_dim, i, head_dim), sums[r]);
            }
        }
        KVDB_UNROLL
        for (int r = 0; r < rows; ++r) {
            out[r * stride] = simd::sum_of_group<Isa, Isa::width>(sums[r])[0];
        }
    }

    KVDB_INLINE static void prefetch(const std::byte* row, std::size_t bytes) {
        for (std::size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
    }

    // The scores of one key, which lies in a row of its own, by all queries.
    template <class T>
    KVDB_INLINE static void score_row(const ScoreItem& item, std::int64_t t, const T* key) {
        const int head_dim = item.blocks.geometry.head_dim;
        std::int64_t r = 0;
        for (; r + kTogether <= item.rows; r += kTogether) {
            dots<T, kTogether>(key, item.queries + r * head_dim, head_dim,
                               item.scores + r * item.score_stride + t, item.score_stride);
        }
        for (; r + 2 <= item.rows; r += 2) {
            dots<T, 2>(key, item.queries + r * head_dim, head_dim,
                       item.scores + r * item.score_stride + t, item.score_stride);
        }
        for (; r < item.rows; ++r) {
            dots<T, 1>(key, item.queries + r * head_dim, head_dim,
                       item.scores + r * item.score_stride + t, item.score_stride);
        }
    }

    // The same of kKeys keys, all sums in registers.
    template <class T>
    KVDB_INLINE static void score_rows(const ScoreItem& item, std::int64_t t,
                                       const T* const* keys) {
        const int head_dim = item.blocks.geometry.head_dim;
        std::int64_t r = 0;
        for (; r + kTogether <= item.rows; r += kTogether) {
            const float* queries = item.queries + r * head_dim;
            f32 sums[kTogether * kKeys] = {};
            for (int i = 0; i < head_dim; i += Isa::width) {
                f32 key[kKeys];
                KVDB_UNROLL
                for (int j = 0; j < kKeys; ++j) key[j] = load(keys[j], i, head_dim);
                KVDB_UNROLL
                for (int q = 0; q < kTogether; ++q) {
                    const f32 query = load(queries + q * head_dim, i, head_dim);
                    KVDB_UNROLL
                    for (int j = 0; j < kKeys; ++j) {
                        sums[q * kKeys + j] = Isa::fma(key[j], query, sums[q * kKeys + j]);
                    }
                }
            }
            const f32 all = simd::sums_of_each<Isa>(sums);
            float lanes[Isa::width];
            Isa::store(lanes, all);
            for (int q = 0; q < kTogether; ++q) {
                __builtin_memcpy(item.scores + (r + q) * item.score_stride + t, lanes + q * kKeys,
                                 kKeys * sizeof(float));
            }
        }
        for (; r < item.rows; ++r) {
            for (int j = 0; j < kKeys; ++j) {
                dots<T, 1>(keys[j], item.queries + r * head_dim, head_dim,
                           item.scores + r * item.score_stride + t + j, item.score_stride);
            }
        }
    }

    template <class T>
    KVDB_INLINE static const T* row(const ScoreItem& item, std::int64_t t) {
        return reinterpret_cast<const T*>(item.blocks.key(item.kv_head, item.tokens[t]));
    }

    // Queries are rotated instead of keys, kRowsMax at a time.
    static void score_quantized(const ScoreItem& item) {
        const int head_dim = item.blocks.geometry.head_dim;
        alignas(64) float queries[kRowsMax * kHeadDimMax];
        alignas(64) float rotated[kHeadDimMax];
        for (std::int64_t first = 0; first < item.rows; first += kRowsMax) {
            ScoreItem part = item;
            part.queries = queries;
            part.rows = item.rows - first < kRowsMax ? item.rows - first : kRowsMax;
            part.scores += first * item.score_stride;
            for (std::int64_t r = 0; r < part.rows; ++r) {
                const std::size_t bytes = head_dim * sizeof(float);
                __builtin_memcpy(rotated, item.queries + (first + r) * head_dim, bytes);
                simd::Hadamard<Isa>::rotate(rotated, head_dim);
                __builtin_memcpy(queries + r * head_dim, rotated, bytes);
            }
            score_rotated(part);
        }
    }

    static void score_rotated(const ScoreItem& item) {
        alignas(64) float rows[kKeys][kHeadDimMax];
        const float* keys[kKeys];
        for (int j = 0; j < kKeys; ++j) keys[j] = rows[j];
        for (std::int64_t t = 0; t < item.count && t < kCodesAhead; ++t) prefetch_codes(item, t);
        std::int64_t t = 0;
        for (; kKeys > 1 && t + kKeys <= item.count; t += kKeys) {
            for (int j = 0; j < kKeys; ++j) load_codes(item, t + j, rows[j]);
            score_rows(item, t, keys);
        }
        for (; t < item.count; ++t) {
            load_codes(item, t, rows[0]);
            score_row(item, t, keys[0]);
        }
    }

    KVDB_INLINE static void load_codes(const ScoreItem& item, std::int64_t t, float* to) {
        if (t + kCodesAhead < item.count) prefetch_codes(item, t + kCodesAhead);
        simd::CodedRow<Isa>::template load<Plane::key>(item.blocks.geometry, item.blocks.table,
                                                       item.kv_head, item.tokens[t], to);
    }

    KVDB_INLINE static void prefetch_codes(const ScoreItem& item, std::int64_t t) {
        simd::CodedRow<Isa>::template prefetch<Plane::key>(item.blocks.geometry, item.blocks.table,
                                                           item.kv_head, item.tokens[t]);
    }

    template <class T>
    static void score(const ScoreItem& item) {
        if (item.blocks.quantized()) return score_quantized(item);
        const std::size_t bytes = item.blocks.geometry.key_row_bytes();
        for (std::int64_t t = 0; t < item.count && t < kAhead; ++t) {
            prefetch(item.blocks.key(item.kv_head, item.tokens[t]), bytes);
        }
        std::int64_t t = 0;
        for (; kKeys > 1 && t + kKeys <= item.count; t += kKeys) {
            const T* keys[kKeys];
            for (int j = 0; j < kKeys; ++j) {
                keys[j] = row<T>(item, t + j);
                if (t + j + kAhead < item.count)
                    prefetch(row<std::byte>(item, t + j + kAhead), bytes);
            }
            score_rows(item, t, keys);
        }
        for (; t < item.count; ++t) score_row(item, t, row<T>(item, t));
    }

    template <Plane plane>
    static void widen_quantized(const WidenItem& item) {
        const Geometry& geometry = item.blocks.geometry;
        alignas(64) float row[kHeadDimMax];
        for (std::int64_t t = 0; t < item.count; ++t) {
            simd::CodedRow<Isa>::template load_back<plane>(geometry, item.blocks.table,
                                                           item.kv_head, item.begin + t, row);
            __builtin_memcpy(item.out + t * geometry.head_dim, row,
                             geometry.head_dim * sizeof(float));
        }
    }

    template <class T, bool values>
    static void widen(const WidenItem& item) {
        if (item.blocks.quantized()) {
            return widen_quantized<values ? Plane::value : Plane::key>(item);
        }
        const Geometry& geometry = item.blocks.geometry;
        const int dims = values ? geometry.value_dim : geometry.head_dim;
        for (std::int64_t t = 0; t < item.count; ++t) {
            const std::int64_t token = item.begin + t;
            const auto* row =
                reinterpret_cast<const T*>(values ? item.blocks.value(item.kv_head, token)
                                                  : item.blocks.key(item.kv_head, token));
            float* out = item.out + t * dims;
            for (int i = 0; i < dims; i += kHeadDimStep) {
                widen_step(row + i, out + i);
            }
        }
    }

    // Eight elements.
    template <class T>
    KVDB_INLINE static void widen_step(const T* from, float* to) {
        if constexpr (Isa::width > kHeadDimStep) {
            const f32 v = Isa::widen_half(from);
            __builtin_memcpy(to, &v, kHeadDimStep * sizeof(float));
        } else {
            for (int i = 0; i < kHeadDimStep; i += Isa::width) {
                Isa::store(to + i, Isa::widen(from + i));
            }
        }
    }

    static constexpr ScoreKernels kernels{
        .score = {score<float>, score<Float16>, score<BFloat16>},
        .widen_keys = {widen<float, false>, widen<Float16, false>, widen<BFloat16, false>},
        .widen_values = {widen<float, true>, widen<Float16, true>, widen<BFloat16, true>},
    };
};

}  // namespace kvdb::indexes
