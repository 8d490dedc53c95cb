// Attention over chosen tokens whose scores are known: only their values are read.
#pragma once

#include "kernels.h"
#include "simd/coded_row.h"
#include "simd/generic.h"

namespace kvdb::kernels {

template <class Isa, class T>
class Retrieved {
    using f32 = typename Isa::f32;
    static constexpr int kChunk = 64;      // tokens whose weights are computed together
    static constexpr int kTogether = 4;    // values that are added up at a time
    static constexpr int kCodesAhead = 4;  // tokens whose codes are on their way
    static constexpr float kLog2e = 1.44269504088896f;

  public:
    static void run(const RetrievedItem& item) {
        alignas(64) float sums[kHeadDimMax];
        clear(sums, item.geometry.value_dim);
        const float top = largest(item);
        float total = 0;
        if (item.state_lse > -__builtin_inff()) {
            total = __builtin_expf(item.state_lse - top);
            for (int i = 0; i < item.geometry.value_dim; ++i) sums[i] = total * item.state_out[i];
        }
        if (item.tail_lse > -__builtin_inff()) {
            const float weight = __builtin_expf(item.tail_lse - top);
            for (int i = 0; i < item.geometry.value_dim; ++i) sums[i] += weight * item.tail_out[i];
            total += weight;
        }
        if (item.sink > -__builtin_inff()) total += __builtin_expf(item.sink - top);
        const bool quantized = item.count && format_of(item.table[0]) != BlockFormat::raw;
        alignas(64) float rotated[kHeadDimMax];
        if (quantized) clear(rotated, item.geometry.value_dim);
        for (std::int64_t t = 0; t < item.count; t += kChunk) {
            const int count = item.count - t < kChunk ? static_cast<int>(item.count - t) : kChunk;
            total += quantized ? add_quantized(item, t, count, top, rotated)
                               : add(item, t, count, top, sums);
        }
        if (quantized) {
            simd::Hadamard<Isa>::rotate_back(rotated, item.geometry.value_dim);
            for (int i = 0; i < item.geometry.value_dim; ++i) sums[i] += rotated[i];
        }
        const float inverse = total > 0 ? 1 / total : 0.0f;
        *item.lse = total > 0 ? top + __builtin_logf(total) : -__builtin_inff();
        switch (item.out_dtype) {
            case Dtype::float32: return write(item, sums, inverse, static_cast<float*>(item.out));
            case Dtype::float16: return write(item, sums, inverse, static_cast<Float16*>(item.out));
            case Dtype::bfloat16:
                return write(item, sums, inverse, static_cast<BFloat16*>(item.out));
        }
    }

  private:
    // Whole vectors: as many as are added up.
    static void clear(float* sums, int dims) {
        for (int i = 0; i < dims; i += Isa::width) Isa::store(sums + i, f32{});
    }

    // The largest of the scaled scores, the states' lse and the sink; 0 if there are none.
    static float largest(const RetrievedItem& item) {
        float top = -__builtin_inff();
        for (std::int64_t t = 0; t < item.count; ++t) {
            if (item.scores[t] > top) top = item.scores[t];
        }
        top *= item.scale;
        if (item.state_lse > top) top = item.state_lse;
        if (item.tail_lse > top) top = item.tail_lse;
        if (item.sink > top) top = item.sink;
        return top == -__builtin_inff() ? 0.0f : top;
    }

    // The softmax weights of `count` tokens from `first` on, before they are divided by their sum.
    KVDB_INLINE static void weigh(const RetrievedItem& item, std::int64_t first, int count,
                                  float top, float* weights) {
        for (int t = 0; t < count; ++t) weights[t] = item.scores[first + t];
        for (int t = 0; t < count; t += Isa::width) {
            const f32 score = Isa::template load<f32>(weights + t);
            Isa::store(weights + t, simd::exp2<Isa>((score * item.scale - top) * kLog2e));
        }
    }

    // Adds the values of `count` tokens from `first` on by their weights; returns the weights' sum.
    static float add(const RetrievedItem& item, std::int64_t first, int count, float top,
                     float* sums) {
        alignas(64) float weights[kChunk] = {};
        weigh(item, first, count, top, weights);
        const T* rows[kChunk + kTogether];
        int kept = 0;
        float total = 0;
        for (int t = 0; t < count; ++t) {
            if (weights[t] == 0) continue;
            rows[kept] = row(item, item.ids[first + t]);
            for (std::size_t i = 0; i < item.geometry.value_row_bytes(); i += 64) {
                __builtin_prefetch(reinterpret_cast<const std::byte*>(rows[kept]) + i);
            }
            total += weights[t];
            weights[kept++] = weights[t];
        }
        const int padded = (kept + kTogether - 1) / kTogether * kTogether;
        for (int t = kept; t < padded; ++t) {
            rows[t] = rows[0];
            weights[t] = 0;
        }
        for (int t = 0; t < padded; t += kTogether) {
            const int value_dim = item.geometry.value_dim;
            for (int i = 0; i < value_dim; i += Isa::width) {
                add_step(rows + t, weights + t, i, i + Isa::width > value_dim, sums + i);
            }
        }
        return total;
    }

    // The same of tokens whose blocks are quantized; their values are added up as they are rotated.
    static float add_quantized(const RetrievedItem& item, std::int64_t first, int count, float top,
                               float* rotated) {
        using Coded = simd::CodedRow<Isa>;
        alignas(64) float weights[kChunk] = {};
        weigh(item, first, count, top, weights);
        const auto ask = [&](int t) {
            Coded::template prefetch<Plane::value>(item.geometry, item.table, item.kv_head,
                                                   item.ids[first + t]);
        };
        for (int t = 0; t < count && t < kCodesAhead; ++t) ask(t);
        float total = 0;
        for (int t = 0; t < count; ++t) {
            if (t + kCodesAhead < count) ask(t + kCodesAhead);
            if (weights[t] == 0) continue;
            Coded::template add<Plane::value>(item.geometry, item.table, item.kv_head,
                                              item.ids[first + t], weights[t], rotated);
            total += weights[t];
        }
        return total;
    }

    // A vector of kTogether values' dimensions, from dimension i on.
    KVDB_INLINE static void add_step(const T* const* rows, const float* weights, int i,
                                     [[maybe_unused]] bool half, float* sums) {
        f32 sum = Isa::template load<f32>(sums);
        KVDB_UNROLL
        for (int t = 0; t < kTogether; ++t) {
            f32 value;
            if constexpr (Isa::width > kHeadDimStep) {
                value = half ? Isa::widen_half(rows[t] + i) : Isa::widen(rows[t] + i);
            } else {
                value = Isa::widen(rows[t] + i);
            }
            sum = Isa::fma(Isa::splat(weights[t]), value, sum);
        }
        Isa::store(sums, sum);
    }

    static const T* row(const RetrievedItem& item, std::int64_t token) {
        const std::int64_t block = token / item.geometry.block_size;
        const auto* base = reinterpret_cast<const std::byte*>(item.table[block]);
        return reinterpret_cast<const T*>(
            base + item.geometry.value_at(item.kv_head, token - block * item.geometry.block_size));
    }

    template <class Out>
    static void write(const RetrievedItem& item, const float* sums, float factor, Out* out) {
        for (int i = 0; i < item.geometry.value_dim; i += Isa::width) {
            const f32 v = Isa::template load<f32>(sums + i) * factor;
            if (i + Isa::width <= item.geometry.value_dim) {
                Isa::narrow(out + i, v);
            } else {
                Out lanes[Isa::width];
                Isa::narrow(lanes, v);
                for (int j = 0; i + j < item.geometry.value_dim; ++j) out[i + j] = lanes[j];
            }
        }
    }
};

}  // namespace kvdb::kernels
