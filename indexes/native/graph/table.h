// Estimates from codes, codes of keys and distances of keys, in one instruction set.
#pragma once

#include "../score/table.h"
#include "kernels.h"
#include "simd/generic.h"

namespace kvdb::indexes::graph {

template <class Isa>
struct GraphTable {
    using f32 = typename Isa::f32;
    using i32 = typename Isa::i32;
    static constexpr int kTogether = 4;
    static constexpr int kCodesAhead = 32;  // codes in order that are on their way
    static constexpr int kAhead = 8;        // tokens whose keys are on their way

    static void estimate(const EstimateItem& item) {
        std::int64_t r = 0;
        for (; r + kTogether <= item.rows; r += kTogether) estimate_rows<kTogether>(item, r);
        for (; r < item.rows; ++r) estimate_rows<1>(item, r);
    }

    template <int rows>
    static void estimate_rows(const EstimateItem& item, std::int64_t row) {
        std::int64_t t = 0;
        if constexpr (requires(i32 v) { Isa::dot_bytes(v, v, v); }) {
            constexpr int tokens = Isa::width / rows;
            for (; t + tokens <= item.count; t += tokens) {
                if (!item.tokens) prefetch_behind(item, t, tokens);
                dot_tile<rows>(item, row, t);
            }
        }
        for (; t < item.count; ++t) {
            const std::uint8_t* code = code_of(item, t);
            for (int r = 0; r < rows; ++r) {
                const std::int64_t at = row + r;
                const auto sum = dot(code, item.queries + at * item.stride, item.stride);
                item.out[at * item.out_stride + t] =
                    item.bias[at] + item.factor[at] * static_cast<float>(sum);
            }
        }
    }

    // Codes in order: what the processor prefetches by itself ends with each page of memory.
    KVDB_INLINE static void prefetch_behind(const EstimateItem& item, std::int64_t t,
                                            std::int64_t tokens) {
        const std::uint8_t* from = item.codes + (t + kCodesAhead) * item.apart;
        for (std::int64_t i = 0; i < tokens * item.apart; i += 64) __builtin_prefetch(from + i);
    }

    // As many tokens as fill a vector with the sums of all rows.
    template <int rows>
    KVDB_INLINE static void dot_tile(const EstimateItem& item, std::int64_t row, std::int64_t t) {
        constexpr int tokens = Isa::width / rows;
        i32 sums[Isa::width] = {};
        const std::uint8_t* codes[tokens];
        for (int j = 0; j < tokens; ++j) codes[j] = code_of(item, t + j);
        for (std::int64_t i = 0; i < item.stride; i += sizeof(i32)) {
            i32 query[rows];
            KVDB_UNROLL
            for (int r = 0; r < rows; ++r) {
                query[r] = Isa::template load<i32>(item.queries + (row + r) * item.stride + i);
            }
            KVDB_UNROLL
            for (int j = 0; j < tokens; ++j) {
                const i32 code = Isa::template load<i32>(codes[j] + i);
                KVDB_UNROLL
                for (int r = 0; r < rows; ++r) {
                    sums[r * tokens + j] = Isa::dot_bytes(code, query[r], sums[r * tokens + j]);
                }
            }
        }
        f32 floats[Isa::width];
        KVDB_UNROLL
        for (int l = 0; l < Isa::width; ++l) {
            floats[l] = __builtin_convertvector(sums[l], f32);  // below 2^24, exact
        }
        const f32 all = simd::sum_each<Isa>(floats);
        for (int r = 0; r < rows; ++r) {
            for (int j = 0; j < tokens; ++j) {
                item.out[(row + r) * item.out_stride + t + j] =
                    item.bias[row + r] + item.factor[row + r] * all[r * tokens + j];
            }
        }
    }

    KVDB_INLINE static const std::uint8_t* code_of(const EstimateItem& item, std::int64_t t) {
        return item.codes + (item.tokens ? item.tokens[t] : t) * item.apart;
    }

    KVDB_INLINE static std::int32_t dot(const std::uint8_t* code, const std::int8_t* query,
                                        std::int64_t count) {
        std::int32_t sum = 0;
        for (std::int64_t i = 0; i < count; ++i) sum += std::int32_t{code[i]} * query[i];
        return sum;
    }

    template <int dtype, class T>
    static void encode(const EncodeItem& item) {
        const int head_dim = item.blocks.geometry.head_dim;
        float key[kHeadDimMax];
        for (std::int64_t t = 0; t < item.count; ++t) {
            ScoreTable<Isa>::kernels.widen_keys[dtype](
                {item.blocks, item.kv_head, item.begin + t, 1, key});
            std::uint8_t* code = item.codes + t * item.apart;
            float rest = 0;
            for (int i = 0; i < head_dim; ++i) {
                const float exact = (key[i] - item.low[i]) / item.step[i] + 0.5f;
                const float within = exact < 0 ? 0 : exact > 255 ? 255 : exact;
                code[i] = static_cast<std::uint8_t>(within);
                const float error =
                    key[i] - (item.low[i] + item.step[i] * static_cast<float>(code[i]));
                rest += error * error;
            }
            for (std::int64_t i = head_dim; i < item.stride; ++i) code[i] = 0;
            item.residual[t] = __builtin_sqrtf(rest);
        }
    }

    template <class T>
    static void distance(const DistanceItem& item) {
        const std::size_t bytes = item.blocks.geometry.key_row_bytes();
        if (item.blocks.quantized()) return distance_quantized(item);
        for (std::int64_t t = 0; t < item.count; ++t) {
            if (t + kAhead < item.count) {
                ScoreTable<Isa>::prefetch(item.blocks.key(item.kv_head, item.tokens[t + kAhead]),
                                          bytes);
            }
            const auto* key =
                reinterpret_cast<const T*>(item.blocks.key(item.kv_head, item.tokens[t]));
            item.out[t] = distance_of(item, key);
        }
    }

    // Distances stay as they are where both vectors are rotated.
    static void distance_quantized(const DistanceItem& item) {
        const int head_dim = item.blocks.geometry.head_dim;
        alignas(64) float key[kHeadDimMax], rotated[kHeadDimMax];
        __builtin_memcpy(rotated, item.vector, head_dim * sizeof(float));
        simd::Hadamard<Isa>::rotate(rotated, head_dim);
        DistanceItem turned = item;
        turned.vector = rotated;
        for (std::int64_t t = 0; t < item.count; ++t) {
            simd::CodedRow<Isa>::template load<Plane::key>(item.blocks.geometry, item.blocks.table,
                                                           item.kv_head, item.tokens[t], key);
            item.out[t] = distance_of<float>(turned, key);
        }
    }

    template <class T>
    KVDB_INLINE static float distance_of(const DistanceItem& item, const T* key) {
        const int head_dim = item.blocks.geometry.head_dim;
        f32 sum = {};
        for (int i = 0; i < head_dim; i += Isa::width) {
            const f32 apart = ScoreTable<Isa>::load(key, i, head_dim) -
                              ScoreTable<Isa>::load(item.vector, i, head_dim);
            sum = Isa::fma(apart, apart, sum);
        }
        return simd::sum_of_group<Isa, Isa::width>(sum)[0];
    }

    static float mass(const float* scores, std::int64_t count, float largest, float scale) {
        const float log2_e = 1.44269504f;
        f32 sum = {};
        std::int64_t t = 0;
        for (; t + Isa::width <= count; t += Isa::width) {
            sum += simd::exp2<Isa>((Isa::widen(scores + t) - largest) * (scale * log2_e));
        }
        float rest[Isa::width];
        for (int l = 0; l < Isa::width; ++l) {
            rest[l] = t + l < count ? scores[t + l] : -__builtin_inff();
        }
        sum += simd::exp2<Isa>((Isa::widen(rest) - largest) * (scale * log2_e));
        return simd::sum_of_group<Isa, Isa::width>(sum)[0];
    }

    static constexpr GraphKernels kernels{
        .estimate = estimate,
        .encode = {encode<0, float>, encode<1, Float16>, encode<2, BFloat16>},
        .distance = {distance<float>, distance<Float16>, distance<BFloat16>},
        .mass = mass,
    };
};

}  // namespace kvdb::indexes::graph
