// What the bindings of every part share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace kvdb {

using OffsetsArray = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ScoresArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] inline void fail(const std::string& message) {
    throw std::invalid_argument(message);
}

template <class AnyArray>
std::string shape_of(const AnyArray& array) {
    std::string text = "[";
    for (std::size_t i = 0; i < array.ndim(); ++i) {
        text += (i ? ", " : "") + std::to_string(array.shape(i));
    }
    return text + "]";
}

void bind_checksum(nb::module_& m);
void bind_observe(nb::module_& m);

}  // namespace kvdb
