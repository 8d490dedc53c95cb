// The last step of attention: merge the states of a row, divide, write in the output's type.
#pragma once

#include "../kernels.h"
#include "operand.h"

namespace kvdb::kernels {

template <class Isa>
class Finish {
    using f32 = typename Isa::f32;

  public:
    static void run(const FinishItem& item) {
        switch (item.out_dtype) {
            case Dtype::float32:
                return write<float>(item);
            case Dtype::float16:
                return write<Float16>(item);
            case Dtype::bfloat16:
                return write<BFloat16>(item);
        }
    }

  private:
    template <class Out>
    static void write(const FinishItem& item) {
        for (int head = 0; head < item.heads; ++head) {
            for (std::int64_t r = item.row_begin; r < item.row_end; ++r) {
                const std::int64_t local = head * item.state.rows + r - item.row_begin;
                const float base = largest_max(item, local);
                float sum = 0;
                for (int s = 0; s < item.splits; ++s) {
                    sum += item.state.sum[s * item.step + local] * weight(item, local, s, base);
                }
                merge(item, local, base, sum, row_of<Out>(item.out, item, head, r));
                if (item.lse) {
                    const std::int64_t q_head =
                        std::int64_t{item.kv_head + head} * item.group + r % item.group;
                    item.lse[q_head * item.lse_stride + r / item.group] = log_sum_exp(base, sum);
                }
            }
        }
    }

    // 0 for a row that saw nothing: -inf - -inf would not be a number.
    static float largest_max(const FinishItem& item, std::int64_t local) {
        float max = -__builtin_inff();
        for (int s = 0; s < item.splits; ++s) {
            const float other = item.state.max[s * item.step + local];
            if (other > max) max = other;
        }
        return max == -__builtin_inff() ? 0.0f : max;
    }

    static float weight(const FinishItem& item, std::int64_t local, int split, float base) {
        return __builtin_exp2f(item.state.max[split * item.step + local] - base);
    }

    static float log_sum_exp(float base, float sum) {
        constexpr float ln2 = 0.693147180559945f;
        return sum == 0 ? -__builtin_inff() : base * ln2 + __builtin_logf(sum);
    }

    template <class Out>
    static void merge(const FinishItem& item, std::int64_t local, float base, float sum, Out* out) {
        const std::int64_t stride = round_up(item.head_dim, kLanePadding);
        const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
        float totals[kHeadDimMax] = {};
        for (int s = 0; s < item.splits; ++s) {
            const f32 share = Isa::splat(weight(item, local, s, base) * inverse);
            const float* values = item.state.values + (s * item.step + local) * stride;
            for (int i = 0; i < item.head_dim; i += Isa::width) {
                const f32 total = Isa::template load<f32>(totals + i);
                Isa::store(totals + i, Isa::fma(Isa::template load<f32>(values + i), share, total));
            }
        }
        int i = 0;
        for (; i + Isa::width <= item.head_dim; i += Isa::width) {
            Isa::narrow(out + i, Isa::template load<f32>(totals + i));
        }
        if (i < item.head_dim) {
            Out lanes[Isa::width];
            Isa::narrow(lanes, Isa::template load<f32>(totals + i));
            for (int j = 0; i + j < item.head_dim; ++j) out[i + j] = lanes[j];
        }
    }
};

}  // namespace kvdb::kernels
