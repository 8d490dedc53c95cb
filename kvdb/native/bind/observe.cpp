#include "../steps/observe.h"

#include <nanobind/stl/optional.h>

#include <algorithm>

#include "bind.h"

using namespace nb::literals;

namespace kvdb {
namespace {

using FloatsArray = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using ConstFloatsArray = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using BoolsArray = nb::ndarray<bool, nb::c_contig, nb::device::cpu>;
using ConstBoolsArray = nb::ndarray<const bool, nb::c_contig, nb::device::cpu>;

template <class AnyArray>
void check_size(const AnyArray& array, std::int64_t size, const char* name) {
    if (static_cast<std::int64_t>(array.size()) != size) {
        fail(std::string(name) + " has shape " + shape_of(array) + "; expected " +
             std::to_string(size) + " elements");
    }
}

// A caller's bytes may be other than 0 and 1.
const std::uint8_t* bytes_of(const std::optional<ConstBoolsArray>& flags) {
    return flags ? reinterpret_cast<const std::uint8_t*>(flags->data()) : nullptr;
}

// One row for each query head.
RetrievedRows retrieved_rows(const OffsetsArray& offsets, const ScoresArray& scores,
                             const std::optional<ConstBoolsArray>& dense) {
    const auto rows = static_cast<std::int64_t>(offsets.shape(0)) - 1;
    const std::int64_t* at = offsets.data();
    if (rows < 0 || at[0] != 0 || at[rows] != static_cast<std::int64_t>(scores.shape(0)) ||
        !std::is_sorted(at, at + rows + 1)) {
        fail("offsets must rise from 0 to the number of scores, " +
             std::to_string(scores.shape(0)));
    }
    if (dense) check_size(*dense, rows, "dense");
    return {rows, at, scores.data(), bytes_of(dense)};
}

void py_raise_top(const OffsetsArray& offsets, const ScoresArray& scores,
                  const std::optional<ConstBoolsArray>& dense, const FloatsArray& top) {
    const RetrievedRows retrieved = retrieved_rows(offsets, scores, dense);
    check_size(top, retrieved.rows, "top");
    const ReleaseGil release;
    raise_top(retrieved, top.data());
}

bool py_observe(const OffsetsArray& offsets, const ScoresArray& scores,
                const std::optional<ConstBoolsArray>& dense,
                const std::optional<ConstBoolsArray>& active_heads, std::int64_t kv_heads,
                double tokens, const ConstFloatsArray& window, const ConstFloatsArray& top,
                const ConstFloatsArray& lse, float scale, const FloatsArray& values,
                const BoolsArray& seen) {
    const RetrievedRows retrieved = retrieved_rows(offsets, scores, dense);
    if (kv_heads < 1 || retrieved.rows % kv_heads != 0) {
        fail("kv_heads is " + std::to_string(kv_heads) + "; expected a divisor of the " +
             std::to_string(retrieved.rows) + " rows");
    }
    if (!(tokens > 0)) fail("tokens is " + std::to_string(tokens) + "; expected more than 0");
    if (active_heads) check_size(*active_heads, kv_heads, "active_heads");
    check_size(window, retrieved.rows, "window");
    check_size(top, retrieved.rows, "top");
    check_size(lse, retrieved.rows, "lse");
    check_size(values, 4 * retrieved.rows, "values");
    check_size(seen, 4 * retrieved.rows, "seen");
    const ObserveCall call{retrieved,     bytes_of(active_heads),
                           kv_heads,      tokens,
                           window.data(), top.data(),
                           lse.data(),    scale,
                           values.data(), seen.data()};
    return observe(call);
}

}  // namespace

void bind_observe(nb::module_& m) {
    m.def("raise_top", &py_raise_top, "offsets"_a, "scores"_a, "dense"_a.none(), "top"_a);
    m.def("observe", &py_observe, "offsets"_a, "scores"_a, "dense"_a.none(),
          "active_heads"_a.none(), "kv_heads"_a, "tokens"_a, "window"_a, "top"_a, "lse"_a,
          "scale"_a, "values"_a, "seen"_a);
}

}  // namespace kvdb
