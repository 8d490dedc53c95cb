#include "../pages/file_reads.h"

#include <cerrno>
#include <system_error>

#include "bind.h"

using namespace nb::literals;

namespace kvdb {
namespace {

void py_read_pages(int file, const TableArray& offsets, const TableArray& addresses, ReadWay way) {
    if (offsets.shape(0) != addresses.shape(0)) {
        fail("offsets has shape " + shape_of(offsets) + "; expected one for each of " +
             std::to_string(addresses.shape(0)) + " addresses");
    }
    int error = 0;
    {
        const ReleaseGil release;
        try {
            read_pages(file, offsets.data(), addresses.data(),
                       static_cast<std::int64_t>(offsets.shape(0)), way);
        } catch (const std::system_error& failed) {
            error = failed.code().value();
        }
    }
    if (error) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
}

}  // namespace

void bind_file_reads(nb::module_& m) {
    nb::enum_<ReadWay>(m, "ReadWay")
        .value("ring", ReadWay::ring)
        .value("threads", ReadWay::threads);
    m.def("read_pages", &py_read_pages, "file"_a, "offsets"_a, "addresses"_a,
          "way"_a = ReadWay::ring);
}

}  // namespace kvdb
