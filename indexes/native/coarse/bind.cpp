#include "../bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "search.h"

namespace kvdb::indexes::coarse {

using namespace nb::literals;

namespace {

// `Pages` as Python holds them; keeps the arrays alive.
struct PyPages {
    Pages pages;
    std::int64_t page_tokens;
    nb::dict arrays;
};

std::int64_t integer(const nb::dict& fields, const char* name, std::int64_t least,
                     std::int64_t most) {
    if (!fields.contains(name)) fail(std::string("pages have no ") + name);
    const auto value = nb::cast<std::int64_t>(fields[name]);
    if (value < least || value > most) {
        fail(std::string(name) + " is " + std::to_string(value) + "; expected " +
             std::to_string(least) + " to " + std::to_string(most));
    }
    return value;
}

void check_members(const Pages& pages) {
    for (std::int64_t i = 0; i < pages.segments * pages.kv_heads; ++i) {
        const PageSet set = pages.of(i / pages.kv_heads, static_cast<int>(i % pages.kv_heads));
        bool right = set.first[0] == 0 && set.first[pages.pages] == pages.tokens;
        for (std::int64_t p = 0; p < pages.pages; ++p) right &= set.first[p] <= set.first[p + 1];
        if (!right) fail("first does not rise from 0 to the number of tokens");
        for (std::int64_t t = 0; set.members && t < pages.tokens; ++t) {
            right &= set.members[t] < pages.tokens;
        }
        if (!right) fail("members names a token beyond its segment");
    }
}

PyPages make_pages(const nb::dict& fields, const nb::dict& arrays) {
    Pages pages{};
    pages.begin = integer(fields, "begin", 0, INT32_MAX);
    pages.segments = integer(fields, "segments", 1, INT32_MAX);
    pages.tokens = integer(fields, "tokens", 1, 65536);
    pages.pages = integer(fields, "pages", 1, 65536);
    pages.kv_heads = static_cast<int>(integer(fields, "kv_heads", 1, INT32_MAX));
    pages.head_dim = static_cast<int>(integer(fields, "head_dim", kHeadDimStep, kHeadDimMax));
    pages.value_dim = fields.contains("value_dim")
                          ? static_cast<int>(integer(fields, "value_dim", 0, kHeadDimMax))
                          : pages.head_dim;
    pages.box = integer(fields, "box", 0, 1) == 1;
    if (pages.pages % kPageGroup != 0) fail("pages is not a multiple of its group");
    const std::int64_t p = pages.pages, d = pages.head_dim;
    const PyArrays named(arrays, pages.segments, pages.kv_heads);
    pages.all = {named.find<std::uint8_t>("center", p * pages.center_dims()),
                 named.find<float>("center_scales", p),
                 named.find<std::uint8_t>("farthest", p * d),
                 named.find<float>("farthest_scales", p),
                 named.find<std::uint8_t>("radius", p * kChannelBlocks),
                 named.find<float>("radius_scales", p),
                 named.find<std::int32_t>("first", p + 1),
                 named.find<std::uint16_t>("members", pages.tokens),
                 named.find<std::uint16_t, BFloat16>("values", p * pages.value_dim),
                 named.find<float>("shift", d),
                 named.find<float>("spread", kChannelBlocks),
                 named.find<float>("norm", 1)};
    const PageSet& all = pages.all;
    if (!all.center || !all.center_scales || !all.first || !all.shift || !all.spread || !all.norm ||
        !all.farthest != !all.farthest_scales || !all.radius != !all.radius_scales ||
        (all.farthest && !all.radius) || pages.box != !all.radius) {
        fail("arrays of pages are missing, or do not go together");
    }
    return {pages, integer(fields, "page_tokens", 1, 65536), arrays};
}

void check_within(const PyPages& pages, const Blocks& blocks) {
    const Pages& at = pages.pages;
    if (at.kv_heads != blocks.geometry.kv_heads || at.head_dim != blocks.geometry.head_dim ||
        at.value_dim != blocks.geometry.value_dim ||
        at.begin + at.segments * at.tokens > blocks.tokens) {
        fail("pages are not those of these blocks");
    }
}

void py_build(const PyBlocks& blocks, const PyPages& pages, std::int64_t clusters, int iterations,
              float far, const std::optional<In<std::uint16_t, 3>>& nearest) {
    check_within(pages, blocks.blocks);
    if (clusters < 1 || clusters > std::min(pages.pages.pages, pages.pages.tokens) ||
        iterations < 1 || !(far >= 0 && far < 1)) {
        fail("clusters, iterations or far do not fit the pages");
    }
    if (nearest) {
        const Pages& at = pages.pages;
        check_shape(*nearest, {at.segments, at.kv_heads, at.tokens}, "nearest");
        const std::uint16_t* end = nearest->data() + nearest->size();
        if (std::any_of(nearest->data(), end, [&](std::uint16_t c) { return c >= clusters; })) {
            fail("nearest names a cluster beyond the " + std::to_string(clusters) + " that are");
        }
    }
    const ReleaseGil release;
    build(blocks.blocks, pages.pages, {clusters, iterations, far}, pages.page_tokens,
          nearest ? nearest->data() : nullptr);
}

bool py_verify(const PyBlocks& blocks, const PyPages& pages) {
    check_within(pages, blocks.blocks);
    check_members(pages.pages);
    const ReleaseGil release;
    return verify(blocks.blocks, pages.pages, pages.page_tokens);
}

// The batches that together hold all tokens of the blocks. tail: whether their values are needed.
std::vector<Pages> pages_of(const PyBlocks& blocks, const nb::list& batches, bool tail) {
    std::vector<Pages> all;
    std::int64_t end = 0;
    for (const nb::handle batch : batches) {
        const auto& pages = nb::cast<const PyPages&>(batch);
        check_within(pages, blocks.blocks);
        if (pages.pages.begin != end) fail("pages do not follow each other");
        if (!all.empty() &&
            (all[0].box != pages.pages.box || !all[0].all.farthest != !pages.pages.all.farthest)) {
            fail("pages are of several kinds");
        }
        end += pages.pages.segments * pages.pages.tokens;
        all.push_back(pages.pages);
        if (tail && !pages.pages.all.values) fail("these pages keep no values");
    }
    if (end != blocks.blocks.tokens) fail("pages do not hold all tokens of the blocks");
    return all;
}

nb::tuple py_search(const PyBlocks& blocks, const nb::list& batches, const PyQueries& queries,
                    int retrieval, double parameter, float scale, float margin, bool exact,
                    const In<float, 2>& outside, bool tail, bool tight, bool give_up) {
    queries.check(blocks.blocks);
    const SearchOptions options = checked_options(queries, retrieval, parameter, scale, margin,
                                                  outside, tail, tight, give_up);
    const std::vector<Pages> all = pages_of(blocks, batches, tail);
    SearchResult result;
    {
        const ReleaseGil release;
        result = search(blocks.blocks, all, queries.rows, {options, exact});
    }
    return to_tuple(std::move(result));
}

nb::capsule py_searcher(const PyBlocks& blocks, const nb::list& batches, int retrieval,
                        double parameter, float scale, float margin, bool exact, bool tail) {
    const SearchOptions options =
        checked_options(retrieval, parameter, scale, margin, tail, false, true);
    std::vector<nb::object> alive;
    for (const nb::handle batch : batches) alive.push_back(nb::borrow(batch));
    return to_searcher(
        blocks, 1, alive.empty() ? nullptr : alive[0].ptr(),
        {double(retrieval), parameter, scale, margin, double(exact), double(tail),
         double(alive.size())},
        [=, all = pages_of(blocks, batches, tail)](const QueryRows& queries, const float* outside) {
            static_cast<void>(alive);
            CoarseOptions some{options, exact};
            some.outside = outside;
            return search(blocks.blocks, all, queries, some);
        });
}

}  // namespace

void bind(nb::module_& m) {
    nb::class_<PyPages>(m, "CoarsePages")
        .def(
            "__init__",
            [](PyPages* self, const nb::dict& fields, const nb::dict& arrays) {
                new (self) PyPages(make_pages(fields, arrays));
            },
            "fields"_a, "arrays"_a)
        .def("check", [](const PyPages& pages) { check_members(pages.pages); });
    m.def("coarse_build", &py_build, "blocks"_a, "pages"_a, "clusters"_a, "iterations"_a, "far"_a,
          "nearest"_a.none() = nb::none());
    m.def("coarse_verify", &py_verify, "blocks"_a, "pages"_a);
    m.def("coarse_searcher", &py_searcher, "blocks"_a, "pages"_a, "retrieval"_a, "parameter"_a,
          "scale"_a, "margin"_a, "exact"_a, "tail"_a);
    m.def("coarse_search", &py_search, "blocks"_a, "pages"_a, "queries"_a, "retrieval"_a,
          "parameter"_a, "scale"_a, "margin"_a, "exact"_a, "outside"_a, "tail"_a, "tight"_a,
          "give_up"_a);
}

}  // namespace kvdb::indexes::coarse
