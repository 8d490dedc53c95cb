#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>

#include "bind.h"

using namespace nb::literals;

namespace kvdb {
namespace {

using ViewArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
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

}  // namespace kvdb
