// The Python module: checks shapes and types, releases the GIL, calls.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "../attend/attend.h"
#include "../pages/transfer.h"
#include "bind.h"

using namespace nb::literals;

namespace kvdb {
namespace {

using LseArray = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstLseArray = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OptionalConst = std::optional<ConstArray>;
using OptionalArray = std::optional<Array>;
using StateArray = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

std::optional<std::tuple<const char*, int, std::int64_t>> py_append(const Geometry& geometry,
                                                                    const TableArray& table,
                                                                    std::int64_t start,
                                                                    const ConstArray& k,
                                                                    const OptionalConst& v) {
    const std::int64_t n = tokens_of(k, "k");
    const Rows keys = keys_of(k, n, geometry, "k");
    const Rows values = values_of(v, n, geometry, false, "v");
    std::optional<NotFinite> bad;
    {
        const ReleaseGil release;
        bad = append(geometry, table_of(table), start, n, keys, values);
    }
    if (!bad) return std::nullopt;
    return std::tuple{bad->plane == Plane::key ? "k" : "v", bad->kv_head, bad->token};
}

bool py_finite(const Geometry& geometry, const ConstArray& array,
               const std::optional<ConstLseArray>& logs) {
    const std::int64_t n = tokens_of(array, "array");
    const auto heads = static_cast<std::int64_t>(array.shape(0));
    const bool of_values = static_cast<std::int64_t>(array.shape(2)) == geometry.value_dim;
    const int dims = of_values ? geometry.value_dim : geometry.head_dim;
    const Rows rows = rows_of(array, heads, n, dims, geometry.dtype, "array");
    if (logs) check_shape(*logs, {heads, n}, "logs");
    for (std::size_t i = 0; logs && i < logs->size(); ++i) {
        if (!std::isfinite(logs->data()[i])) return false;
    }
    const ReleaseGil release;
    return finite(geometry, static_cast<int>(heads), n, dims, rows);
}

void py_gather(const Geometry& geometry, const TableArray& table, std::int64_t start,
               std::int64_t n, const Array& k_out, const OptionalArray& v_out) {
    const Rows keys = keys_of(k_out, n, geometry, "k_out");
    const Rows values = values_of(v_out, n, geometry, true, "v_out");
    const ReleaseGil release;
    gather(geometry, table_of(table), start, n, keys, values);
}

void py_copy(const Geometry& geometry, const TableArray& source, std::int64_t source_start,
             const TableArray& target, std::int64_t target_start, std::int64_t n) {
    const ReleaseGil release;
    copy(geometry, table_of(source), source_start, table_of(target), target_start, n);
}

void py_attend(const Geometry& geometry, const ConstArray& q, const TableArray& table,
               const CountsArray& counts, std::int64_t causal, float scale, const Array& out,
               const std::optional<LseArray>& lse, const std::optional<LseArray>& top, int kv_begin,
               std::optional<int> kv_end, const std::optional<OffsetsArray>& ends,
               const OwnedPlacement* placement, const std::optional<ScoresArray>& sinks,
               std::int64_t window) {
    AttendCall call{};
    call.geometry = geometry;
    call.n = tokens_of(q, "q");
    const auto q_heads = static_cast<std::int64_t>(q.shape(0));
    if (q_heads == 0 || q_heads % geometry.kv_heads != 0) {
        fail("q has " + std::to_string(q_heads) + " heads; expected a multiple of the " +
             std::to_string(geometry.kv_heads) + " KV heads");
    }
    call.q_heads = static_cast<int>(q_heads);
    call.kv_begin = kv_begin;
    call.kv_end = kv_end.value_or(geometry.kv_heads);
    if (kv_begin < 0 || kv_begin > call.kv_end || call.kv_end > geometry.kv_heads) {
        fail("KV heads [" + std::to_string(kv_begin) + ", " + std::to_string(call.kv_end) +
             ") are not among the " + std::to_string(geometry.kv_heads) + " there are");
    }
    call.query = rows_of(q, q_heads, call.n, geometry.head_dim, geometry.dtype, "q");
    call.out_dtype = has_dtype(out, Dtype::float32) ? Dtype::float32 : geometry.dtype;
    call.out = rows_of(out, q_heads, call.n, geometry.value_dim, call.out_dtype, "out");
    if (counts.shape(0) != table.shape(0)) {
        fail("counts has " + std::to_string(counts.shape(0)) +
             " elements; expected one for each of " + std::to_string(table.shape(0)) +
             " blocks in table");
    }
    if (lse) check_shape(*lse, {q_heads, call.n}, "lse");
    if (top) check_shape(*top, {q_heads, call.n}, "top");
    call.run = {table.data(), counts.data(), static_cast<std::int64_t>(table.shape(0))};
    Placement moved;
    if (placement) {
        moved = placement->of(geometry, call.run.blocks);
        call.run.placement = &moved;
    }
    if (ends && static_cast<std::int64_t>(ends->shape(0)) != call.n) {
        fail("ends has " + std::to_string(ends->shape(0)) + " elements; expected one for each of " +
             std::to_string(call.n) + " queries");
    }
    call.ends = ends ? ends->data() : nullptr;
    call.sinks = checked_sinks(sinks, q_heads);
    call.window = window;
    call.causal = causal;
    call.scale = scale;
    call.lse = lse ? lse->data() : nullptr;
    call.top = top ? top->data() : nullptr;
    const ReleaseGil release;
    attend(call);
}

// The state and its destination: arguments of attention over chosen tokens and of the merge of a
// tail.
AttendRetrievedCall state_call(const Geometry& geometry, const StateArray& state_out,
                               const ConstLseArray& state_lse, const Array& out,
                               const LseArray& lse) {
    AttendRetrievedCall call{};
    const auto q_heads = static_cast<std::int64_t>(state_out.shape(0));
    call.geometry = geometry;
    call.q_heads = static_cast<int>(q_heads);
    call.n = static_cast<std::int64_t>(state_out.shape(1));
    if (q_heads == 0 || q_heads % geometry.kv_heads != 0) {
        fail("state_out has " + std::to_string(q_heads) + " heads; expected a multiple of the " +
             std::to_string(geometry.kv_heads) + " KV heads");
    }
    rows_of(state_out, q_heads, call.n, geometry.value_dim, Dtype::float32, "state_out");
    call.out_dtype = has_dtype(out, Dtype::float32) ? Dtype::float32 : geometry.dtype;
    const Rows rows = rows_of(out, q_heads, call.n, geometry.value_dim, call.out_dtype, "out");
    const std::int64_t dims = geometry.value_dim;
    if (rows.token_stride != dims || rows.head_stride != call.n * dims) {
        fail("out is not contiguous");
    }
    check_shape(state_lse, {q_heads, call.n}, "state_lse");
    check_shape(lse, {q_heads, call.n}, "lse");
    call.scale = 1;
    call.state_out = state_out.data();
    call.state_lse = state_lse.data();
    call.out = rows.data;
    call.lse = lse.data();
    return call;
}

void py_attend_retrieved(const Geometry& geometry, const TableArray& table,
                         const OffsetsArray& offsets, const CountsArray& ids,
                         const ScoresArray& scores, float scale, const StateArray& state_out,
                         const ConstLseArray& state_lse, const Array& out, const LseArray& lse) {
    AttendRetrievedCall call = state_call(geometry, state_out, state_lse, out, lse);
    const std::int64_t q_heads = call.q_heads, n = call.n;
    const auto count = static_cast<std::int64_t>(ids.shape(0));
    const std::int64_t* at = offsets.data();
    if (static_cast<std::int64_t>(offsets.shape(0)) != q_heads * n + 1 || at[0] != 0 ||
        at[q_heads * n] != count || !std::is_sorted(at, at + q_heads * n + 1)) {
        fail("offsets must rise from 0 to the number of ids, " + std::to_string(count) + ", in " +
             std::to_string(q_heads * n + 1) + " steps");
    }
    if (static_cast<std::int64_t>(scores.shape(0)) != count) {
        fail("scores has " + std::to_string(scores.shape(0)) +
             " elements; expected one for each of " + std::to_string(count) + " ids");
    }
    const std::int64_t tokens = table_of(table).size * geometry.block_size;
    const auto [low, high] = std::minmax_element(ids.data(), ids.data() + count);
    if (count > 0 && (*low < 0 || *high >= tokens)) {
        fail("ids run from " + std::to_string(*low) + " to " + std::to_string(*high) +
             "; expected tokens of the blocks, 0 to " + std::to_string(tokens - 1));
    }
    call.table = table.data();
    call.offsets = at;
    call.ids = ids.data();
    call.scores = scores.data();
    call.scale = scale;
    const ReleaseGil release;
    attend_retrieved(call);
}

void py_merge_tail(const Geometry& geometry, const StateArray& state_out,
                   const ConstLseArray& state_lse, const StateArray& tail_out,
                   const ConstLseArray& tail_lse, const Array& out, const LseArray& lse) {
    AttendRetrievedCall call = state_call(geometry, state_out, state_lse, out, lse);
    const std::int64_t q_heads = call.q_heads, n = call.n;
    rows_of(tail_out, q_heads, n, geometry.value_dim, Dtype::float32, "tail_out");
    check_shape(tail_lse, {q_heads, n}, "tail_lse");
    for (std::int64_t row = 0; row < q_heads * n; ++row) {
        if (!(tail_lse.data()[row] < INFINITY)) {
            fail("tail_lse holds NaN or infinity; expected finite numbers, or -inf for none");
        }
    }
    const ReleaseGil release;
    const std::vector<std::int64_t> no_tokens(q_heads * n + 1);
    call.offsets = no_tokens.data();
    call.tail_out = tail_out.data();
    call.tail_lse = tail_lse.data();
    attend_retrieved(call);
}

std::uint64_t py_read_blocks(const Geometry& geometry, const TableArray& table) {
    const ReleaseGil release;
    return read_blocks(geometry, table_of(table));
}

}  // namespace
}  // namespace kvdb

NB_MODULE(_native, m) {
    using namespace kvdb;

    // A program may end while threads of its own, as those of a server, still hold what is bound.
    nb::set_leak_warnings(false);
    bind_dtype(m);
    translate_page_errors();
    nb::class_<Geometry>(m, "Geometry")
        .def(
            "__init__",
            [](Geometry* self, Dtype dtype, int kv_heads, int head_dim, int block_size,
               std::optional<int> value_dim, bool values_in_keys) {
                new (self) Geometry(checked_geometry(dtype, kv_heads, head_dim, block_size,
                                                     value_dim, values_in_keys));
            },
            "dtype"_a, "kv_heads"_a, "head_dim"_a, "block_size"_a = 64, "value_dim"_a = nb::none(),
            "values_in_keys"_a = false)
        .def_ro("dtype", &Geometry::dtype)
        .def_ro("kv_heads", &Geometry::kv_heads)
        .def_ro("head_dim", &Geometry::head_dim)
        .def_ro("block_size", &Geometry::block_size)
        .def_ro("value_dim", &Geometry::value_dim)
        .def_ro("values_in_keys", &Geometry::values_in_keys)
        .def_prop_ro("block_bytes", &Geometry::block_bytes);

    bind_placement(m);
    bind_format(m);
    m.def("append", &py_append, "geometry"_a, "table"_a, "start"_a, "k"_a, "v"_a.none());
    m.def("finite", &py_finite, "geometry"_a, "array"_a, "logs"_a = nb::none());
    m.def("gather", &py_gather, "geometry"_a, "table"_a, "start"_a, "n"_a, "k_out"_a,
          "v_out"_a.none());
    m.def("copy", &py_copy, "geometry"_a, "source"_a, "source_start"_a, "target"_a,
          "target_start"_a, "n"_a);
    m.def("attend", &py_attend, "geometry"_a, "q"_a, "table"_a, "counts"_a, "causal"_a, "scale"_a,
          "out"_a, "lse"_a = nb::none(), "top"_a = nb::none(), "kv_begin"_a = 0,
          "kv_end"_a = nb::none(), "ends"_a = nb::none(), "placement"_a = nb::none(),
          "sinks"_a = nb::none(), "window"_a = 0);
    m.def("attend_retrieved", &py_attend_retrieved, "geometry"_a, "table"_a, "offsets"_a, "ids"_a,
          "scores"_a, "scale"_a, "state_out"_a, "state_lse"_a, "out"_a, "lse"_a);
    m.def("merge_tail", &py_merge_tail, "geometry"_a, "state_out"_a, "state_lse"_a, "tail_out"_a,
          "tail_lse"_a, "out"_a, "lse"_a);
    bind_checksum(m);
    bind_file_reads(m);
    bind_indexer(m);
    bind_pages(m);
    bind_moves(m);
    bind_step(m);
    bind_layer_steps(m);
    bind_shared_ring(m);
    bind_shared_step(m);
    bind_shared_calls(m);
    m.def("read_blocks", &py_read_blocks, "geometry"_a, "table"_a);
    bind_settings(m);
}
