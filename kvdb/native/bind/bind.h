// What all bindings of this module share.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../kernels/kernels.h"
#include "../pages/transfer.h"
#include "bind_base.h"

namespace kvdb {

using Array = nb::ndarray<nb::device::cpu>;
using ConstArray = nb::ndarray<nb::ro, nb::device::cpu>;
using TableArray = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CountsArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OffsetsArray = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ScoresArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// 16-bit types cross as uint16, which every array library has.
template <class AnyArray>
bool has_dtype(const AnyArray& array, Dtype dtype) {
    return array.dtype() ==
           (dtype == Dtype::float32 ? nb::dtype<float>() : nb::dtype<std::uint16_t>());
}

// [heads, n, dims] of the given type, the last dimension contiguous.
template <class AnyArray>
Rows rows_of(const AnyArray& array, std::int64_t heads, std::int64_t n, int dims, Dtype dtype,
             const char* name) {
    if (array.ndim() != 3 || static_cast<std::int64_t>(array.shape(0)) != heads ||
        static_cast<std::int64_t>(array.shape(1)) != n ||
        static_cast<std::int64_t>(array.shape(2)) != dims) {
        fail(std::string(name) + " has shape " + shape_of(array) + "; expected [" +
             std::to_string(heads) + ", " + std::to_string(n) + ", " + std::to_string(dims) + "]");
    }
    if (!has_dtype(array, dtype)) {
        fail(std::string(name) + " has the wrong type; expected " +
             (dtype == Dtype::float32 ? "float32" : "uint16, the bits of a 16-bit float"));
    }
    if (n > 0 && dims > 0 && array.stride(2) != 1) {
        fail(std::string(name) + " has stride " + std::to_string(array.stride(2)) +
             " in its last dimension; expected 1 element");
    }
    return {const_cast<void*>(static_cast<const void*>(array.data())), array.stride(0),
            array.stride(1)};
}

// The keys of tokens, as they are stored.
template <class AnyArray>
Rows keys_of(const AnyArray& array, std::int64_t n, const Geometry& geometry, const char* name) {
    return rows_of(array, geometry.kv_heads, n, geometry.head_dim, geometry.dtype, name);
}

// Their values, of which there may be none where a block has none of its own. `written`: where they
// are read to; else they are not looked at there.
template <class AnyArray>
Rows values_of(const std::optional<AnyArray>& array, std::int64_t n, const Geometry& geometry,
               bool written, const char* name) {
    if (!array && geometry.own_values()) {
        fail(std::string(name) + " is None; tokens of this geometry have values of their own");
    }
    if (!array || (!written && !geometry.own_values())) return {nullptr, 0, 0};
    return rows_of(*array, geometry.kv_heads, n, geometry.value_dim, geometry.dtype, name);
}

template <class AnyArray>
std::int64_t tokens_of(const AnyArray& array, const char* name) {
    if (array.ndim() != 3) {
        fail(std::string(name) + " has shape " + shape_of(array) +
             "; expected [heads, tokens, dimensions]");
    }
    return static_cast<std::int64_t>(array.shape(1));
}

// A logit for each query head, or null where there are none.
inline const float* checked_sinks(const std::optional<ScoresArray>& sinks, std::int64_t q_heads) {
    if (!sinks) return nullptr;
    check_shape(*sinks, {q_heads}, "sinks");
    for (std::int64_t head = 0; head < q_heads; ++head) {
        if (!(sinks->data()[head] < INFINITY)) {
            fail("sinks holds NaN or infinity; expected finite numbers, or -inf for none");
        }
    }
    return sinks->data();
}

inline Table table_of(const TableArray& table) {
    return {table.data(), static_cast<std::int64_t>(table.shape(0))};
}

// The arrays of a Python `Placement`, copied, so that what was checked stays as it was.
struct OwnedPlacement {
    std::vector<std::int32_t> view;
    std::vector<float> cos, sin;
    std::vector<std::uint64_t> hidden;
    int pairs, words;  // words: 0 where nothing is hidden
    bool interleaved;

    // The placement of a run of `blocks` blocks of the geometry; valid as long as this object
    // lives.
    Placement of(const Geometry& geometry, std::int64_t blocks) const;
};

void bind_checksum(nb::module_& m);
void bind_file_reads(nb::module_& m);
void bind_format(nb::module_& m);
void bind_indexer(nb::module_& m);
void bind_pages(nb::module_& m);
void bind_placement(nb::module_& m);  // the class alone, of which attend's signature speaks
void bind_moves(nb::module_& m);
void bind_shared_calls(nb::module_& m);
void bind_shared_ring(nb::module_& m);
void bind_shared_step(nb::module_& m);
void bind_step(nb::module_& m);
void bind_layer_steps(nb::module_& m);

}  // namespace kvdb
