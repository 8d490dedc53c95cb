#include "../pages/checksum.h"

#include "bind.h"

using namespace nb::literals;

namespace kvdb {
namespace {

using AddressArray = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SumArray = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void py_crc32c(const AddressArray& table, std::int64_t nbytes, const SumArray& out) {
    if (nbytes < 0) fail("nbytes is " + std::to_string(nbytes) + "; expected 0 or more");
    if (out.shape(0) != table.shape(0)) {
        fail("out has shape " + shape_of(out) + "; expected one element for each of " +
             std::to_string(table.shape(0)) + " blocks");
    }
    const ReleaseGil release;
    crc32c(table.data(), static_cast<std::int64_t>(table.shape(0)),
           static_cast<std::size_t>(nbytes), out.data());
}

}  // namespace

void bind_checksum(nb::module_& m) {
    m.def("crc32c", &py_crc32c, "table"_a, "nbytes"_a, nb::arg("out").noconvert());
}

}  // namespace kvdb
