// The last step of attention: merge the states of a row, divide, write in the output's type.
#pragma once

#include "kernels.h"
#include "operand.h"

namespace kvdb::kernels {

template <class Isa>
class Finish {
    using f32 = typename Isa::f32;

  public:
    static void run(const FinishItem& item) {
        switch (item.out_dtype) {
            case Dtype::float32: return write<float>(item);
            case Dtype::float16: return write<Float16>(item);
            case Dtype::bfloat16: return write<BFloat16>(item);
        }
    }

  private:
    static constexpr float none = -__builtin_inff();
    static constexpr float ln2 = 0.693147180559945f, log2e = 1.44269504088896f;

    template <class Out>
    static void write(const FinishItem& item) {
        for (int head = 0; head < item.heads; ++head) {
            for (std::int64_t r = item.row_begin; r < item.row_end; ++r) {
                const std::int64_t local = head * item.state.rows + r - item.row_begin;
                const std::int64_t q_head =
                    std::int64_t{item.kv_head + head} * item.group + r % item.group;
                const float sink = item.sinks ? item.sinks[q_head] * log2e : none;
                const float most = largest_max(item, local);
                const float base = sink > most || most == none ? (sink > none ? sink : 0) : most;
                alignas(64) float values[kHeadDimMax];
                for (int i = 0; i < item.value_dim; i += Isa::width) Isa::store(values + i, f32{});
                const float read = merge(item, local, base, values);
                const float sum = sink > none ? read + __builtin_exp2f(sink - base) : read;
                const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
                store_row(values, inverse, item.value_dim, row_of<Out>(item.out, item, head, r));
                const std::int64_t at = q_head * item.lse_stride + r / item.group;
                if (item.lse) item.lse[at] = sum == 0 ? none : base * ln2 + __builtin_logf(sum);
                const bool seen = sink > none ? most > none : sum != 0;
                const float top = most > none ? most : 0;
                if (item.top) item.top[at] = seen ? top * item.top_factor : none;
            }
        }
    }

    // -inf for a row that saw nothing.
    static float largest_max(const FinishItem& item, std::int64_t local) {
        float max = none;
        for (int s = 0; s < item.splits; ++s) {
            const float other = item.state.max[s * item.step + local];
            if (other > max) max = other;
        }
        return max;
    }

    // Adds up the states' values, relative to exp2(base), and returns the sum of their sums.
    static float merge(const FinishItem& item, std::int64_t local, float base, float* values) {
        const std::int64_t stride = round_up(item.value_dim, kLanePadding);
        float sum = 0;
        for (int s = 0; s < item.splits; ++s) {
            const std::int64_t row = s * item.step + local;
            const float weight = __builtin_exp2f(item.state.max[row] - base);
            sum += weight * item.state.sum[row];
            const float* part = item.state.values + row * stride;
            for (int i = 0; i < item.value_dim; i += Isa::width) {
                const f32 total = Isa::template load<f32>(values + i);
                Isa::store(values + i,
                           Isa::fma(Isa::template load<f32>(part + i), Isa::splat(weight), total));
            }
        }
        return sum;
    }

    template <class Out>
    static void store_row(const float* values, float factor, int value_dim, Out* out) {
        int i = 0;
        for (; i + Isa::width <= value_dim; i += Isa::width) {
            Isa::narrow(out + i, Isa::template load<f32>(values + i) * factor);
        }
        if (i < value_dim) {
            Out lanes[Isa::width];
            Isa::narrow(lanes, Isa::template load<f32>(values + i) * factor);
            for (int j = 0; i + j < value_dim; ++j) out[i + j] = lanes[j];
        }
    }
};

}  // namespace kvdb::kernels
