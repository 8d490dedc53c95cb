// What the bindings of all kinds share: arrays that come from Python, blocks, queries, results.
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

    std::int64_t q_heads() const { return static_cast<std::int64_t>(q.shape(0)); }
    // Fails unless they fit these blocks.
    void check(const Blocks& blocks) const;
};

// Fails unless offsets [rows + 1] rise, and stay within `count` elements.
void check_offsets(const In<std::int64_t, 1>& offsets, std::int64_t rows, std::int64_t count);

// Fails unless they are a search. Nothing is known of what is outside.
SearchOptions checked_options(int retrieval, double parameter, float scale, float margin, bool tail,
                              bool tight, bool give_up);

// Fails unless they are a search of these queries.
SearchOptions checked_options(const PyQueries& queries, int retrieval, double parameter,
                              float scale, float margin, const In<float, 2>& outside, bool tail,
                              bool tight, bool give_up);

// A vector as a numpy array that owns it.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T>&& values) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner);
}

// What `SearchResult.of_kernel` takes in Python.
nb::tuple to_tuple(SearchResult&& result);

// The arrays of an index, [rows][kv_heads][...], which Python owns. A row is what is indexed
// together: a chunk or a segment of tokens.
class PyArrays {
  public:
    PyArrays(const nb::dict& by_name, std::int64_t rows, std::int64_t kv_heads)
        : by_name_(by_name), rows_(rows), kv_heads_(kv_heads) {}

    // The array of this name, with `each` elements for every row and KV head; null where there is
    // none.
    template <class T, class Element = T>
    Element* find(const char* name, std::int64_t each) const {
        if (!by_name_.contains(name)) return nullptr;
        Out<T, 3> array;
        if (!nb::try_cast(nb::object(by_name_[name]), array, false)) {
            throw nb::type_error((std::string(name) + " has another dtype or layout").c_str());
        }
        check_shape(array, {rows_, kv_heads_, each}, name);
        return reinterpret_cast<Element*>(array.data());
    }

    // The same; fails where there is none.
    template <class T>
    T* get(const char* name, std::int64_t each) const {
        T* array = find<T>(name, each);
        if (!by_name_.contains(name)) fail(std::string("there is no array ") + name);
        return array;
    }

  private:
    const nb::dict& by_name_;
    const std::int64_t rows_, kv_heads_;
};

// A searcher that calls `search`, as Python passes it on. rows_together: see `Searcher`. index: an
// address of what it holds that no other index has. asked: the numbers that say what for. It holds
// Python's arrays, so it ends with the interpreter's lock held.
template <class Search>
nb::capsule to_searcher(const PyBlocks& blocks, int rows_together, const void* index,
                        std::vector<double> asked, Search search) {
    class Bound final : public Searcher {
      public:
        Bound(const PyBlocks& blocks, int rows_together, const void* index,
              std::vector<double> asked, Search search)
            : Searcher(blocks.blocks.geometry, blocks.blocks.table, blocks.blocks.tokens,
                       rows_together, index, std::move(asked)),
              search_(std::move(search)) {}
        SearchResult search(const QueryRows& queries, const float* outside) const override {
            return search_(queries, outside);
        }

      private:
        const Search search_;
    };
    Searcher* made = new Bound(blocks, rows_together, index, std::move(asked), std::move(search));
    return nb::capsule(made, kSearcherName,
                       [](void* p) noexcept { delete static_cast<Searcher*>(p); });
}

void bind_python_searcher(nb::module_& m);

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
