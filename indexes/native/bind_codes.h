// The class under which Python knows the codes of a kind that codes all tokens chunk by chunk.
#pragma once

#include "bind.h"
#include "chunks.h"

namespace kvdb::indexes {

// Codes in arrays that Python owns: checked once, used for several calls.
template <class Codes>
struct PyCodes {
    Codes codes;
    std::int64_t tokens;  // that there is room for
    nb::dict arrays;      // kept alive

    // Fails unless these are codes of such blocks, with room for their tokens.
    void check(const PyBlocks& blocks) const {
        const Geometry& geometry = blocks.blocks.geometry;
        if (geometry.kv_heads != codes.kv_heads || geometry.head_dim != codes.head_dim) {
            fail("the index is of " + std::to_string(codes.kv_heads) + " KV heads of " +
                 std::to_string(codes.head_dim) + "; the blocks hold " +
                 std::to_string(geometry.kv_heads) + " of " + std::to_string(geometry.head_dim));
        }
        if (Codes::kSymmetric && !geometry.symmetric()) {
            fail("values have " + std::to_string(geometry.value_dim) + " numbers" +
                 (geometry.values_in_keys ? ", which are the keys' first," : "") + " and keys " +
                 std::to_string(geometry.head_dim) +
                 "; this kind of index codes values of their own, as long as keys: build another");
        }
        if (blocks.blocks.tokens > tokens) {
            fail("the blocks hold " + std::to_string(blocks.blocks.tokens) +
                 " tokens; the index has room for " + std::to_string(tokens));
        }
    }
};

// Binds the class, with the verbs that all such kinds have. `read` takes codes from arrays; a kind
// has functions `insert` and `verify` beside its codes.
template <class Codes>
nb::class_<PyCodes<Codes>> bind_codes(nb::module_& m, const char* name,
                                      Codes (*read)(const PyArrays&, int kv_heads, int head_dim)) {
    using namespace nb::literals;
    using Self = PyCodes<Codes>;
    return nb::class_<Self>(m, name)
        .def(
            "__init__",
            [read](Self* self, std::int64_t chunks, int kv_heads, int head_dim,
                   const nb::dict& arrays) {
                checked_geometry(Dtype::float32, kv_heads, head_dim, 1);
                new (self) Self{read(PyArrays(arrays, chunks, kv_heads), kv_heads, head_dim),
                                chunks * kChunk, arrays};
            },
            "chunks"_a, "kv_heads"_a, "head_dim"_a, "arrays"_a)
        .def(
            "insert",
            [](const Self& self, const PyBlocks& blocks, std::int64_t coded) {
                self.check(blocks);
                if (coded < 0 || coded > blocks.blocks.tokens) {
                    fail("coded is " + std::to_string(coded) + "; expected 0 to " +
                         std::to_string(blocks.blocks.tokens));
                }
                const ReleaseGil release;
                insert(blocks.blocks, self.codes, coded);
            },
            "blocks"_a, "coded"_a)
        .def(
            "verify",
            [](const Self& self, const PyBlocks& blocks) {
                self.check(blocks);
                const ReleaseGil release;
                return verify(blocks.blocks, self.codes);
            },
            "blocks"_a);
}

}  // namespace kvdb::indexes
