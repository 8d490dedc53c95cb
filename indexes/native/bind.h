// What the bindings of all kinds share: arrays that come from Python, blocks, queries.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bind_base.h"
#include "blocks.h"
#include "query_rows.h"
#include "searcher.h"

namespace kvdb::indexes {

template <class T, int dims>
using In = nb::ndarray<const T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;
template <class T, int dims>
using Out = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;

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
    std::optional<In<bool, 1>> active_heads;
    std::int64_t hidden_words = 0;

    // Fails unless they fit these blocks.
    void check(const Blocks& blocks) const;
};

// A vector as a numpy array that owns it.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T>&& values) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner);
}

// A searcher as Python passes it on. It holds Python's arrays, so it ends with the lock held.
inline nb::capsule to_capsule(std::unique_ptr<Searcher> searcher) {
    return nb::capsule(searcher.release(), kSearcherName,
                       [](void* p) noexcept { delete static_cast<Searcher*>(p); });
}

namespace flat {
void bind(nb::module_& m);
}
namespace coarse {
void bind(nb::module_& m);
}
namespace graph {
void bind(nb::module_& m);
}
namespace quantized {
void bind(nb::module_& m);
}

}  // namespace kvdb::indexes
