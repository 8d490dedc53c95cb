// The Python module, with the bindings that all kinds of index use. Each kind has its own bindings
// beside its kernels.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "bind.h"
#include "chunks.h"
#include "score/kernels.h"
#include "thread_pool.h"

namespace kvdb::indexes {

using namespace nb::literals;

namespace {

PyBlocks make_blocks(const Geometry& geometry, const In<std::uint64_t, 1>& table,
                     std::int64_t tokens) {
    const auto room = static_cast<std::int64_t>(table.shape(0)) * geometry.block_size;
    if (tokens < 0 || tokens > room || tokens > INT32_MAX) {
        fail("tokens is " + std::to_string(tokens) + "; expected 0 to " + std::to_string(room) +
             ", what the blocks hold");
    }
    const bool quantized = tokens > 0 && format_of(table.data()[0]) != BlockFormat::raw;
    if (quantized && (!geometry.symmetric() || geometry.head_dim > kQuantizedDimMax)) {
        fail("quantized blocks hold keys and values of as many numbers, " +
             std::to_string(kQuantizedDimMax) + " at most, apart from each other");
    }
    return {{geometry, table.data(), tokens}, table};
}

void check_finite(const float* values, std::int64_t count, const char* name) {
    float sum = 0;
    for (std::int64_t i = 0; i < count; ++i) sum += values[i] * 0.0f;
    if (!(sum == 0.0f)) fail(std::string(name) + " holds NaN or infinity; expected finite numbers");
}

PyQueries make_queries(const In<float, 3>& q, int kv_heads, const In<std::int64_t, 1>& begin,
                       const In<std::int64_t, 1>& end, const In<float, 2>& floor,
                       const std::optional<In<std::uint64_t, 1>>& hidden,
                       const std::optional<In<bool, 1>>& active_heads) {
    const auto q_heads = static_cast<std::int64_t>(q.shape(0));
    const auto n = static_cast<std::int64_t>(q.shape(1));
    if (kv_heads < 1 || q_heads < 1 || q_heads % kv_heads != 0) {
        fail("q has " + std::to_string(q_heads) + " heads; expected a multiple of the " +
             std::to_string(kv_heads) + " KV heads");
    }
    check_shape(begin, {n}, "begin");
    check_shape(end, {n}, "end");
    check_shape(floor, {q_heads, n}, "floor");
    if (active_heads) check_shape(*active_heads, {kv_heads}, "active_heads");
    check_finite(q.data(), static_cast<std::int64_t>(q.size()), "q");
    for (std::int64_t i = 0; i < q_heads * n; ++i) {
        if (!(floor.data()[i] < INFINITY)) {
            fail("floor holds NaN or infinity; expected finite numbers, or -inf for none");
        }
    }
    PyQueries made{{}, q, begin, end, hidden, floor, active_heads};
    made.rows = {q.data(),
                 n,
                 static_cast<int>(q_heads / kv_heads),
                 begin.data(),
                 end.data(),
                 hidden ? hidden->data() : nullptr,
                 floor.data(),
                 active_heads ? active_heads->data() : nullptr};
    made.hidden_words = hidden ? static_cast<std::int64_t>(hidden->shape(0)) : 0;
    return made;
}

// Exact scores of each row's own tokens.
void score(const PyBlocks& blocks, const PyQueries& queries, const In<std::int64_t, 1>& offsets,
           const In<std::int32_t, 1>& ids, const Out<float, 1>& scores) {
    queries.check(blocks.blocks);
    const std::int64_t rows = queries.q_heads() * queries.rows.n;
    const auto count = static_cast<std::int64_t>(ids.shape(0));
    check_offsets(offsets, rows, count);
    check_shape(scores, {count}, "scores");
    const std::int64_t* at = offsets.data();
    for (std::int64_t i = 0; i < count; ++i) {
        if (ids.data()[i] < 0 || ids.data()[i] >= blocks.blocks.tokens) {
            fail("ids[" + std::to_string(i) + "] is " + std::to_string(ids.data()[i]) +
                 "; expected a token below " + std::to_string(blocks.blocks.tokens));
        }
    }
    const ReleaseGil release;
    ThreadPool& pool = ThreadPool::instance();
    const int threads = count * blocks.blocks.geometry.head_dim < (1 << 16) ? 1 : pool.threads();
    pool.run(rows, threads, [&](std::int64_t row, int) {
        score_tokens({blocks.blocks, static_cast<int>(row / queries.rows.rows()),
                      queries.rows.q + row * blocks.blocks.geometry.head_dim, 1,
                      ids.data() + at[row], at[row + 1] - at[row], scores.data() + at[row], 0});
    });
}

void check_range(const PyBlocks& blocks, int kv_head, std::int64_t begin, std::int64_t count) {
    const Geometry& geometry = blocks.blocks.geometry;
    if (kv_head < 0 || kv_head >= geometry.kv_heads) {
        fail("kv_head is " + std::to_string(kv_head) + "; expected 0 to " +
             std::to_string(geometry.kv_heads - 1));
    }
    if (begin < 0 || count > blocks.blocks.tokens - begin) {
        fail(std::to_string(count) + " tokens from " + std::to_string(begin) +
             " on were asked for; there are " + std::to_string(blocks.blocks.tokens));
    }
}

void widen(const PyBlocks& blocks, int kv_head, std::int64_t begin, const Out<float, 2>& out,
           bool values) {
    const Geometry& geometry = blocks.blocks.geometry;
    const auto count = static_cast<std::int64_t>(out.shape(0));
    check_shape(out, {count, values ? geometry.value_dim : geometry.head_dim}, "out");
    check_range(blocks, kv_head, begin, count);
    const ReleaseGil release;
    (values ? widen_values : widen_keys)({blocks.blocks, kv_head, begin, count, out.data()});
}

void copy_keys(const PyBlocks& blocks, int kv_head, std::int64_t begin,
               const Out<std::uint8_t, 2>& out) {
    const Geometry& geometry = blocks.blocks.geometry;
    const auto row = static_cast<std::int64_t>(geometry.key_row_bytes());
    const auto count = static_cast<std::int64_t>(out.shape(0));
    check_shape(out, {count, row}, "out");
    check_range(blocks, kv_head, begin, count);
    const ReleaseGil release;
    require_range(geometry, blocks.blocks.table, kv_head, begin, count, false);
    for (std::int64_t done = 0; done < count;) {
        const std::int64_t token = begin + done, in_block = token % geometry.block_size;
        const std::int64_t run = std::min(geometry.block_size - in_block, count - done);
        std::memcpy(out.data() + done * row, blocks.blocks.key(kv_head, token), run * row);
        done += run;
    }
}

}  // namespace

void PyQueries::check(const Blocks& blocks) const {
    const Geometry& geometry = blocks.geometry;
    if (q_heads() != std::int64_t{rows.group} * geometry.kv_heads) {
        fail("q has " + std::to_string(q_heads()) + " heads; expected " +
             std::to_string(rows.group) + " for each of " + std::to_string(geometry.kv_heads));
    }
    if (static_cast<int>(q.shape(2)) != geometry.head_dim) {
        fail("q has head_dim " + std::to_string(q.shape(2)) + "; expected " +
             std::to_string(geometry.head_dim));
    }
    for (std::int64_t i = 0; i < rows.n; ++i) {
        if (rows.begin[i] < 0 || rows.end[i] > blocks.tokens || rows.begin[i] > rows.end[i]) {
            fail("query " + std::to_string(i) + " sees tokens [" + std::to_string(rows.begin[i]) +
                 ", " + std::to_string(rows.end[i]) + "); expected a range within [0, " +
                 std::to_string(blocks.tokens) + ")");
        }
    }
    if (rows.hidden && hidden_words < (blocks.tokens + 63) / 64) {
        fail("hidden has " + std::to_string(hidden_words) + " words; expected " +
             std::to_string((blocks.tokens + 63) / 64) + ", a bit for each token");
    }
}

void check_offsets(const In<std::int64_t, 1>& offsets, std::int64_t rows, std::int64_t count) {
    check_shape(offsets, {rows + 1}, "offsets");
    const std::int64_t* at = offsets.data();
    if (at[0] < 0 || at[rows] > count || !std::is_sorted(at, at + rows + 1)) {
        fail("offsets must rise, from 0 to at most " + std::to_string(count));
    }
}

SearchOptions checked_options(int retrieval, double parameter, float scale, float margin, bool tail,
                              bool tight, bool give_up) {
    const double most = retrieval == 2 ? 9e18 : retrieval == 3 ? 1 : INFINITY;
    if (retrieval < 0 || retrieval > 3 || !(parameter >= (retrieval == 2) && parameter <= most)) {
        fail("retrieval and parameter are no retrieval");
    }
    if (!(margin >= 0 && margin <= 1) || !(scale > 0 && std::isfinite(scale))) {
        fail("margin must be 0 to 1, scale positive");
    }
    return {static_cast<SearchOptions::Retrieval>(retrieval),
            parameter,
            scale,
            margin,
            nullptr,
            tail,
            tight,
            give_up};
}

SearchOptions checked_options(const PyQueries& queries, int retrieval, double parameter,
                              float scale, float margin, const In<float, 2>& outside, bool tail,
                              bool tight, bool give_up) {
    check_shape(outside, {queries.q_heads(), queries.rows.n}, "outside");
    for (std::size_t i = 0; i < outside.size(); ++i) {
        if (!(outside.data()[i] < INFINITY)) {
            fail("outside holds NaN or infinity; expected finite numbers, or -inf for none");
        }
    }
    SearchOptions options =
        checked_options(retrieval, parameter, scale, margin, tail, tight, give_up);
    options.outside = outside.data();
    return options;
}

nb::tuple to_tuple(SearchResult&& result) {
    RetrievedRows& rows = result.retrieved;
    return nb::make_tuple(to_numpy(std::move(rows.offsets)), to_numpy(std::move(rows.ids)),
                          to_numpy(std::move(rows.scores)), result.scanned, result.nbytes,
                          to_numpy(std::move(result.missed)), to_numpy(std::move(result.bound)),
                          to_numpy(std::move(result.tail)), to_numpy(std::move(result.dense)));
}

}  // namespace kvdb::indexes

NB_MODULE(_native, m) {
    using namespace kvdb;
    using namespace kvdb::indexes;

    // As in kvdb's own module: a server that ends may leave threads that still hold an index.
    nb::set_leak_warnings(false);
    bind_dtype(m);
    translate_page_errors();
    nb::class_<PyBlocks>(m, "Blocks")
        .def(
            "__init__",
            [](PyBlocks* self, Dtype dtype, int kv_heads, int head_dim, int block_size,
               const In<std::uint64_t, 1>& table, std::int64_t tokens, std::optional<int> value_dim,
               bool values_in_keys) {
                const Geometry geometry = checked_geometry(dtype, kv_heads, head_dim, block_size,
                                                           value_dim, values_in_keys);
                new (self) PyBlocks(make_blocks(geometry, table, tokens));
            },
            "dtype"_a, "kv_heads"_a, "head_dim"_a, "block_size"_a, "table"_a, "tokens"_a,
            "value_dim"_a = nb::none(), "values_in_keys"_a = false);
    nb::class_<PyQueries>(m, "Queries")
        .def(
            "__init__",
            [](PyQueries* self, const In<float, 3>& q, int kv_heads,
               const In<std::int64_t, 1>& begin, const In<std::int64_t, 1>& end,
               const In<float, 2>& floor, const std::optional<In<std::uint64_t, 1>>& hidden,
               const std::optional<In<bool, 1>>& active_heads) {
                new (self)
                    PyQueries(make_queries(q, kv_heads, begin, end, floor, hidden, active_heads));
            },
            "q"_a, "kv_heads"_a, "begin"_a, "end"_a, "floor"_a, "hidden"_a = nb::none(),
            "active_heads"_a.noconvert() = nb::none());

    m.def("score", &score, "blocks"_a, "queries"_a, "offsets"_a, "ids"_a, "scores"_a);
    m.def(
        "read_keys",
        [](const PyBlocks& blocks, int kv_head, std::int64_t begin, const Out<float, 2>& out) {
            widen(blocks, kv_head, begin, out, false);
        },
        "blocks"_a, "kv_head"_a, "begin"_a, "out"_a);
    m.def("copy_keys", &copy_keys, "blocks"_a, "kv_head"_a, "begin"_a, "out"_a);
    m.def(
        "read_values",
        [](const PyBlocks& blocks, int kv_head, std::int64_t begin, const Out<float, 2>& out) {
            widen(blocks, kv_head, begin, out, true);
        },
        "blocks"_a, "kv_head"_a, "begin"_a, "out"_a);
    flat::bind(m);
    coarse::bind(m);
    graph::bind(m);
    quantized::bind(m);
    bind_python_searcher(m);
    m.attr("CHUNK") = kChunk;
    bind_settings(m);
}
