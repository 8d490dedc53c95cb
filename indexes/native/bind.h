// What the bindings of all kinds share: arrays as they cross, the blocks they are about, queries.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "blocks.h"
#include "rows.h"

namespace kvdb::indexes {

namespace nb = nanobind;

template <class T, int dims>
using In = nb::ndarray<const T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;
template <class T, int dims>
using Out = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;

[[noreturn]] inline void fail(const std::string& message) {
    throw std::invalid_argument(message);
}

// Fails unless an array has the shape expected.
template <class Array>
void check_shape(const Array& array, std::initializer_list<std::int64_t> expected,
                 const char* name) {
    bool same = array.ndim() == expected.size();
    std::string has, wants;
    std::size_t i = 0;
    for (const std::int64_t dim : expected) {
        same = same && static_cast<std::int64_t>(array.shape(i)) == dim;
        wants += (i++ ? ", " : "") + std::to_string(dim);
    }
    if (same) return;
    for (i = 0; i < array.ndim(); ++i) has += (i ? ", " : "") + std::to_string(array.shape(i));
    fail(std::string(name) + " has shape [" + has + "]; expected [" + wants + "]");
}

// `Blocks` as Python holds them; keeps the table's array alive.
struct PyBlocks {
    Blocks blocks;
    In<std::uint64_t, 1> table;
};

// `QueryRows` as Python holds them: checked once, used for several calls.
struct PyQueries {
    QueryRows rows;
    In<float, 3> q;
    In<std::int64_t, 1> begin, end;
    std::optional<In<std::uint64_t, 1>> hidden;
    In<float, 2> floor;
    std::optional<In<bool, 1>> asked;
    std::int64_t hidden_words = 0;

    // Fails unless they can be asked of these blocks.
    void check(const Blocks& blocks) const;
};

// A vector as a numpy array that owns it.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T>&& values) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner);
}

void bind_flat(nb::module_& m);
void bind_coarse(nb::module_& m);
void bind_graph(nb::module_& m);

}  // namespace kvdb::indexes
