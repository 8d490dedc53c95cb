#include "../pages/quantize.h"

#include <nanobind/stl/tuple.h>

#include "bind.h"

using namespace nb::literals;

namespace kvdb {
namespace {

std::tuple<double, double, double, double> py_quantize(const Geometry& geometry, BlockFormat format,
                                                       const TableArray& table, std::int64_t n,
                                                       const TableArray& out) {
    if (format == BlockFormat::raw) fail("format is raw; expected a quantized one");
    const ReleaseGil release;
    const QuantizationError of = quantize(geometry, format, table_of(table), n, table_of(out));
    return {of.error[0], of.norm[0], of.error[1], of.norm[1]};
}

void py_dequantize(const Geometry& geometry, BlockFormat format, const TableArray& table,
                   std::int64_t start, std::int64_t n, const Array& k_out, const Array& v_out) {
    if (format == BlockFormat::raw) fail("format is raw; expected a quantized one");
    check_format(geometry, format);
    const Rows keys = keys_of(k_out, n, geometry, "k_out");
    const Rows values = values_of(std::optional(v_out), n, geometry, true, "v_out");
    const ReleaseGil release;
    dequantize(geometry, format, table_of(table), start, n, keys, values);
}

void py_cut(const Geometry& geometry, BlockFormat format, std::uint64_t from, int n,
            std::uint64_t to) {
    if (format == BlockFormat::raw) fail("format is raw; expected a quantized one");
    if (n < 0 || n > geometry.block_size) fail("n is not a number of tokens of a block");
    cut(geometry, format, reinterpret_cast<const std::byte*>(from), n,
        reinterpret_cast<std::byte*>(to));
}

std::size_t py_block_bytes(const Geometry& geometry, BlockFormat format) {
    check_format(geometry, format);
    return block_bytes(geometry, format);
}

}  // namespace

void bind_format(nb::module_& m) {
    nb::enum_<BlockFormat>(m, "BlockFormat")
        .value("raw", BlockFormat::raw)
        .value("int8", BlockFormat::int8)
        .value("int8_int4", BlockFormat::int8_int4)
        .value("int4", BlockFormat::int4);
    m.def("block_bytes", &py_block_bytes, "geometry"_a, "block_format"_a);
    m.def("quantize", &py_quantize, "geometry"_a, "block_format"_a, "table"_a, "n"_a, "out"_a);
    m.def("dequantize", &py_dequantize, "geometry"_a, "block_format"_a, "table"_a, "start"_a, "n"_a,
          "k_out"_a, "v_out"_a);
    m.def("cut", &py_cut, "geometry"_a, "block_format"_a, "block"_a, "n"_a, "out"_a);
}

}  // namespace kvdb
