// A search that Python carries out, for plans that C++ does.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "bind.h"

namespace kvdb::indexes {

using namespace nb::literals;

namespace {

// Offsets, ids, scores, scanned, nbytes, missed, bound, tails, dense: see `SearchResult`.
using PyFound =
    std::tuple<In<std::int64_t, 1>, In<std::int32_t, 1>, In<float, 1>, std::int64_t, std::int64_t,
               In<float, 2>, In<float, 2>, std::optional<In<float, 3>>, std::optional<In<bool, 2>>>;

// A copy, as a numpy array of its own: queries end before Python may let go of them.
template <class T, std::size_t dims>
nb::object copy_of(const T* values, const std::array<std::size_t, dims>& shape) {
    std::size_t size = 1;
    for (const std::size_t length : shape) size *= length;
    auto* owned = new std::vector<std::uint8_t>(size * sizeof(T));
    if (size > 0) std::memcpy(owned->data(), values, owned->size());
    nb::capsule owner(owned,
                      [](void* p) noexcept { delete static_cast<std::vector<std::uint8_t>*>(p); });
    return nb::cast(
        nb::ndarray<nb::numpy, T, nb::ndim<dims>>(owned->data(), dims, shape.data(), owner));
}

template <class Array>
auto vector_of(const Array& array) {
    return std::vector(array.data(), array.data() + array.size());
}

SearchResult checked(const PyFound& found, const Blocks& blocks, std::int64_t heads,
                     std::int64_t n) {
    const auto& [offsets, ids, scores, scanned, nbytes, missed, bound, tail, dense] = found;
    const auto count = static_cast<std::int64_t>(ids.size());
    check_offsets(offsets, heads * n, count);
    if (offsets.data()[0] != 0 || offsets.data()[heads * n] != count) fail("offsets leave out ids");
    check_shape(scores, {count}, "scores");
    check_shape(missed, {heads, n}, "missed");
    check_shape(bound, {heads, n}, "missed_bound");
    const auto beyond = [&](std::int32_t id) { return id < 0 || id >= blocks.tokens; };
    if (std::any_of(ids.data(), ids.data() + count, beyond)) fail("a search found no token of its");
    SearchResult result;
    result.retrieved = {vector_of(offsets), vector_of(ids), vector_of(scores)};
    result.scanned = scanned;
    result.nbytes = nbytes;
    result.missed = vector_of(missed);
    result.bound = vector_of(bound);
    if (tail) {
        check_shape(*tail, {heads, n, blocks.geometry.value_dim}, "tail");
        result.tail = vector_of(*tail);
    }
    result.dense.assign(heads * n, 0);
    if (dense) {
        check_shape(*dense, {heads, n}, "dense");
        std::memcpy(result.dense.data(), dense->data(), result.dense.size());
        for (std::uint8_t& flag : result.dense) flag = flag != 0;
    }
    return result;
}

nb::capsule python_searcher(const PyBlocks& blocks, std::uintptr_t index,
                            const std::vector<double>& asked, const nb::callable& search) {
    constexpr int kRowsTogether = 1 << 10;
    const auto call = [blocks, search](const QueryRows& rows, const float* outside) {
        const nb::gil_scoped_acquire lock;
        const Geometry& geometry = blocks.blocks.geometry;
        const auto heads = static_cast<std::size_t>(geometry.kv_heads) * rows.group;
        const auto n = static_cast<std::size_t>(rows.n), dims = std::size_t(geometry.head_dim);
        const std::size_t words = (blocks.blocks.tokens + 63) / 64;
        nb::object hidden = nb::none(), active = nb::none();
        if (rows.hidden) hidden = copy_of<std::uint64_t, 1>(rows.hidden, {words});
        if (rows.active_heads) {
            active = copy_of<bool, 1>(rows.active_heads, {std::size_t(geometry.kv_heads)});
        }
        const nb::object found = search(
            copy_of<float, 3>(rows.q, {heads, n, dims}), copy_of<std::int64_t, 1>(rows.begin, {n}),
            copy_of<std::int64_t, 1>(rows.end, {n}), copy_of<float, 2>(rows.floor, {heads, n}),
            copy_of<float, 2>(outside, {heads, n}), hidden, active);
        return checked(nb::cast<PyFound>(found), blocks.blocks, static_cast<std::int64_t>(heads),
                       rows.n);
    };
    return to_searcher(blocks, kRowsTogether, reinterpret_cast<const void*>(index), asked, call);
}

}  // namespace

void bind_python_searcher(nb::module_& m) {
    m.def("python_searcher", &python_searcher, "blocks"_a, "index"_a, "asked"_a, "search"_a);
}

}  // namespace kvdb::indexes
