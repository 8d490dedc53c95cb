// Rotates rows by the angles of RoPE, forward or back: in float32, rounded at the end.
#pragma once

#include "kernels.h"
#include "operand.h"

namespace kvdb::kernels {

template <class Isa, class T>
class Rotate {
    using f32 = typename Isa::f32;

  public:
    // A query row of the item as operand lanes, rotated back by the angles of a view of the run's
    // placement; unchanged for view -1.
    static void load_query(float* lanes, const T* row, const AttendItem& item, std::int32_t view) {
        const int head_dim = item.geometry.head_dim;
        if (view < 0) return load_row<Isa, T>(lanes, row, head_dim);
        alignas(64) T rotated[kHeadDimMax];
        rotate(row, head_dim, of_view(*item.run.placement, view), -1.0f, rotated);
        load_row<Isa, T>(lanes, rotated, head_dim);
    }

    // The same as floats, as many as whole vectors hold, and not rounded.
    static void load_floats(float* to, const T* row, const AttendItem& item, std::int32_t view) {
        const int head_dim = item.geometry.head_dim;
        if (view < 0) return widen_row(row, head_dim, to);
        rotate(row, head_dim, of_view(*item.run.placement, view), -1.0f, to);
    }

    static void run(const RotateItem& item) {
        if (item.to_float) {
            run<float>(item);
        } else {
            run<T>(item);
        }
    }

  private:
    static Rotation of_view(const Placement& placement, std::int32_t view) {
        const std::int64_t angles = std::int64_t{view} * placement.pairs;
        return {placement.cos + angles, placement.sin + angles, placement.pairs,
                placement.interleaved};
    }

    template <class Out>
    static void run(const RotateItem& item) {
        const auto* from = static_cast<const std::byte*>(item.from);
        auto* to = static_cast<std::byte*>(item.to);
        alignas(64) Out rotated[kHeadDimMax];
        for (std::int64_t row = 0; row < item.rows; ++row) {
            rotate(reinterpret_cast<const T*>(from + row * item.from_stride), item.head_dim,
                   item.rotation, item.direction, rotated);
            __builtin_memcpy(to + row * item.to_stride, rotated, item.head_dim * sizeof(Out));
        }
    }

    // Writes whole vectors: `to` has room for kHeadDimMax.
    template <class Out>
    static void rotate(const T* from, int head_dim, const Rotation& rotation, float direction,
                       Out* to) {
        alignas(64) float x[kHeadDimMax];
        alignas(64) float y[kHeadDimMax];
        widen_row(from, head_dim, x);
        if (rotation.interleaved) {
            rotate_interleaved(x, rotation, direction, y);
        } else {
            rotate_halves(x, rotation, direction, y);
        }
        for (int i = 2 * rotation.pairs; i < head_dim; ++i) y[i] = x[i];
        for (int i = 0; i < head_dim; i += Isa::width) {
            Isa::narrow(to + i, Isa::template load<f32>(y + i));
        }
    }

    static void widen_row(const T* from, int head_dim, float* to) {
        const int whole = head_dim / Isa::width * Isa::width;
        for (int i = 0; i < whole; i += Isa::width) Isa::store(to + i, Isa::widen(from + i));
        if constexpr (Isa::width > kHeadDimStep) {
            if (whole < head_dim) Isa::store(to + whole, Isa::widen_half(from + whole));
        }
    }

    static void rotate_halves(const float* x, const Rotation& rotation, float direction, float* y) {
        const int pairs = rotation.pairs;
        int i = 0;
        for (; i + Isa::width <= pairs; i += Isa::width) {
            const f32 first = Isa::template load<f32>(x + i);
            const f32 second = Isa::template load<f32>(x + pairs + i);
            const f32 cos = Isa::template load<f32>(rotation.cos + i);
            const f32 sin = Isa::template load<f32>(rotation.sin + i) * direction;
            Isa::store(y + i, first * cos - second * sin);
            Isa::store(y + pairs + i, second * cos + first * sin);
        }
        for (; i < pairs; ++i) {
            const float sin = rotation.sin[i] * direction;
            y[i] = x[i] * rotation.cos[i] - x[pairs + i] * sin;
            y[pairs + i] = x[pairs + i] * rotation.cos[i] + x[i] * sin;
        }
    }

    static void rotate_interleaved(const float* __restrict x, const Rotation& rotation,
                                   float direction, float* __restrict y) {
        for (int i = 0; i < rotation.pairs; ++i) {
            const float sin = rotation.sin[i] * direction;
            y[2 * i] = x[2 * i] * rotation.cos[i] - x[2 * i + 1] * sin;
            y[2 * i + 1] = x[2 * i + 1] * rotation.cos[i] + x[2 * i] * sin;
        }
    }
};

}  // namespace kvdb::kernels
