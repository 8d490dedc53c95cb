#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>

#include "../pages/move.h"
#include "bind.h"

using namespace nb::literals;

namespace kvdb {
namespace {

using ViewArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RotationArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnglesArray = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using HiddenArray = nb::ndarray<const std::uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class AnyArray>
auto copy_of(const AnyArray& array) {
    return std::vector(array.data(), array.data() + array.size());
}

int pairs_of(std::size_t pairs) {
    if (pairs > kHeadDimMax / 2) {
        fail("cos has angles of " + std::to_string(pairs) + " pairs; expected " +
             std::to_string(kHeadDimMax / 2) + " at most");
    }
    return static_cast<int>(pairs);
}

void check_pairs(const Geometry& geometry, int pairs) {
    if (2 * pairs > geometry.head_dim) {
        fail("cos and sin have angles of " + std::to_string(pairs) +
             " pairs; expected at most half the head dimension, " +
             std::to_string(geometry.head_dim));
    }
}

Rotation rotation_of(const Geometry& geometry, const RotationArray& cos, const RotationArray& sin,
                     bool interleaved) {
    if (sin.shape(0) != cos.shape(0)) {
        fail("sin has shape " + shape_of(sin) + "; expected that of cos, " + shape_of(cos));
    }
    const int pairs = pairs_of(cos.shape(0));
    check_pairs(geometry, pairs);
    return {cos.data(), sin.data(), pairs, interleaved};
}

Positions positions_of(const OffsetsArray& positions) {
    return {positions.data(), static_cast<std::int64_t>(positions.shape(0))};
}

int words_of(int block_size) {
    return (block_size + 63) / 64;
}

OwnedPlacement make_placement(const ViewArray& view, const AnglesArray& cos, const AnglesArray& sin,
                              bool interleaved, const std::optional<HiddenArray>& hidden) {
    if (sin.shape(0) != cos.shape(0) || sin.shape(1) != cos.shape(1)) {
        fail("sin has shape " + shape_of(sin) + "; expected that of cos, " + shape_of(cos));
    }
    const auto views = static_cast<std::int64_t>(cos.shape(0));
    for (std::size_t block = 0; block < view.shape(0); ++block) {
        if (view.data()[block] < -1 || view.data()[block] >= views) {
            fail("view[" + std::to_string(block) + "] is " + std::to_string(view.data()[block]) +
                 "; expected -1, or one of the " + std::to_string(views) + " views");
        }
    }
    if (hidden && (hidden->shape(0) != view.shape(0) || hidden->shape(1) < 1 ||
                   hidden->shape(1) > static_cast<std::size_t>(words_of(kBlockSizeMax)))) {
        fail("hidden has shape " + shape_of(*hidden) + "; expected [" +
             std::to_string(view.shape(0)) + ", words of a block's tokens]");
    }
    return {.view = copy_of(view),
            .cos = copy_of(cos),
            .sin = copy_of(sin),
            .hidden = hidden ? copy_of(*hidden) : std::vector<std::uint64_t>{},
            .pairs = pairs_of(cos.shape(1)),
            .words = hidden ? static_cast<int>(hidden->shape(1)) : 0,
            .interleaved = interleaved};
}

void py_place(const Geometry& geometry, const TableArray& source, std::int64_t start,
              const TableArray& target, std::int64_t target_start, std::int64_t n,
              const std::optional<RotationArray>& cos, const std::optional<RotationArray>& sin,
              bool interleaved) {
    if (cos.has_value() != sin.has_value()) fail("cos and sin are given both, or neither");
    if (cos && geometry.values_in_keys) {
        fail("values lie in the keys; rotating these would change the values");
    }
    const Rotation rotation = cos ? rotation_of(geometry, *cos, *sin, interleaved) : Rotation{};
    const ReleaseGil release;
    if (cos) {
        place(geometry, table_of(source), start, table_of(target), target_start, n, rotation);
    } else {
        copy(geometry, table_of(source), start, table_of(target), target_start, n);
    }
}

void py_scatter(const Geometry& geometry, const TableArray& source, std::int64_t source_start,
                const TableArray& target, const OffsetsArray& positions) {
    const ReleaseGil release;
    scatter(geometry, table_of(source), source_start, table_of(target), positions_of(positions));
}

void py_gather_at(const Geometry& geometry, const TableArray& table, const OffsetsArray& positions,
                  const Array& k_out, const std::optional<Array>& v_out) {
    const Positions at = positions_of(positions);
    const Rows keys = keys_of(k_out, at.count, geometry, "k_out");
    const Rows values = values_of(v_out, at.count, geometry, true, "v_out");
    const ReleaseGil release;
    gather_at(geometry, table_of(table), at, keys, values);
}

void py_rotate(const Geometry& geometry, const ConstArray& q, const RotationArray& cos,
               const RotationArray& sin, bool interleaved, const Array& out) {
    const std::int64_t n = tokens_of(q, "q");
    const auto heads = static_cast<std::int64_t>(q.shape(0));
    const Rows rows = rows_of(q, heads, n, geometry.head_dim, geometry.dtype, "q");
    const Rotation rotation = rotation_of(geometry, cos, sin, interleaved);
    const Dtype out_dtype = has_dtype(out, Dtype::float32) ? Dtype::float32 : geometry.dtype;
    const Rows into = rows_of(out, heads, n, geometry.head_dim, out_dtype, "out");
    const ReleaseGil release;
    rotate_back(geometry, static_cast<int>(heads), n, rows, rotation, into,
                out_dtype == Dtype::float32);
}

}  // namespace

Placement OwnedPlacement::of(const Geometry& geometry, std::int64_t blocks) const {
    const auto placed = static_cast<std::int64_t>(view.size());
    if (placed > blocks) {
        fail("placement is of " + std::to_string(placed) + " blocks; the run has " +
             std::to_string(blocks));
    }
    check_pairs(geometry, pairs);
    if (words != 0 && words != words_of(geometry.block_size)) {
        fail("placement hides tokens by " + std::to_string(words) +
             " words for each block; expected " + std::to_string(words_of(geometry.block_size)) +
             " for blocks of " + std::to_string(geometry.block_size) + " tokens");
    }
    return {view.data(),
            placed,
            cos.data(),
            sin.data(),
            pairs,
            interleaved,
            words != 0 ? hidden.data() : nullptr,
            words};
}

void bind_placement(nb::module_& m) {
    nb::class_<OwnedPlacement>(m, "Placement")
        .def(
            "__init__",
            [](OwnedPlacement* self, const ViewArray& view, const AnglesArray& cos,
               const AnglesArray& sin, bool interleaved, const std::optional<HiddenArray>& hidden) {
                new (self) OwnedPlacement(make_placement(view, cos, sin, interleaved, hidden));
            },
            "view"_a, "cos"_a, "sin"_a, "interleaved"_a = false, "hidden"_a = nb::none())
        .def_prop_ro("blocks", [](const OwnedPlacement& self) { return self.view.size(); });
}

void bind_moves(nb::module_& m) {
    m.def("place", &py_place, "geometry"_a, "source"_a, "start"_a, "target"_a, "target_start"_a,
          "n"_a, "cos"_a.none(), "sin"_a.none(), "interleaved"_a = false);
    m.def("scatter", &py_scatter, "geometry"_a, "source"_a, "source_start"_a, "target"_a,
          "positions"_a);
    m.def("gather_at", &py_gather_at, "geometry"_a, "table"_a, "positions"_a, "k_out"_a,
          "v_out"_a.none());
    m.def("rotate", &py_rotate, "geometry"_a, "q"_a, "cos"_a, "sin"_a, "interleaved"_a, "out"_a);
}

}  // namespace kvdb
