// Which instruction sets the kernels use, for the whole process: one for each operation, because
// the widest is not the fastest on every processor. Chosen when the first module is loaded, by the
// processor's family (processor.h) or by KVDB_ISA; later by what was measured.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "export.h"

namespace kvdb {

// amx_emulated is amx with the arithmetic of its tiles in C++: for tests, and never chosen.
enum class Isa : int { amx, avx512_bf16, avx512, avx2, neon, portable, amx_emulated };
inline constexpr int kIsas = 7;

// What an instruction set is chosen for: attention of a few rows and of many, scores of codes, and
// keys and values at scattered places.
enum class Operation : int { decode, prefill, scan, gather };
inline constexpr int kOperations = 4;

// The instruction sets this machine can run, best first. The last is "portable", except in a build
// for one processor alone.
KVDB_BASE std::vector<std::string> isas();

// Those it can emulate, for tests.
KVDB_BASE std::vector<std::string> emulated_isas();

// The best in use, for everything that is no operation.
KVDB_BASE Isa current_isa();
KVDB_BASE std::string isa();

// Uses one for everything. Throws std::invalid_argument if `name` is unknown or this machine cannot
// run it. Calls under way finish with the instruction set they started with.
KVDB_BASE void set_isa(std::string_view name);

// The one that an operation uses, and all operations with theirs.
KVDB_BASE Isa current_isa(Operation operation);
using KernelNames = std::vector<std::pair<std::string, std::string>>;
KVDB_BASE KernelNames chosen_kernels();

// The operations with those that a row of the table has for them, whether this machine runs them or
// not.
struct Family;
KVDB_BASE KernelNames kernels_of(const Family& family);

// The instruction sets among which an operation may choose, best first: isa() and those below it,
// without the portable one unless it is all there is.
KVDB_BASE std::vector<std::string> variants();

// Uses one of isas() that is not better than isa() for an operation. Throws std::invalid_argument.
KVDB_BASE void set_kernels(std::string_view operation, std::string_view isa);

// One set of kernels for each instruction set; null where it is not compiled in.
template <class Kernels>
struct PerIsa {
    const Kernels* of[kIsas];
    const Kernels& current() const { return *of[static_cast<int>(current_isa())]; }
    const Kernels& current(Operation operation) const {
        return *of[static_cast<int>(current_isa(operation))];
    }
};

// Declares and lists `name`_avx2, `name`_portable and so on, one for each simd/<isa>.cpp that is
// compiled in. Kernels without tiles are the same in amx as in avx512_bf16. A build for one
// processor alone (KVDB_ISAS=native) says 0 for what it leaves out, to those who include a list.
#ifndef KVDB_WITH_PORTABLE
#define KVDB_WITH_PORTABLE 1
#endif
#ifndef KVDB_WITH_AVX2
#define KVDB_WITH_AVX2 1
#endif
#ifndef KVDB_WITH_AVX512
#define KVDB_WITH_AVX512 1
#endif
#ifndef KVDB_WITH_AVX512_BF16
#define KVDB_WITH_AVX512_BF16 1
#endif
#define KVDB_LISTED_0(kernels) nullptr
#define KVDB_LISTED_1(kernels) &kernels
#define KVDB_LISTED_IF(with, kernels) KVDB_LISTED_IF_(with, kernels)
#define KVDB_LISTED_IF_(with, kernels) KVDB_LISTED_##with(kernels)
#if defined(__x86_64__)
#define KVDB_DECLARE_PER_ISA(Kernels, name) \
    extern const Kernels name##_avx512_bf16, name##_avx512, name##_avx2, name##_portable
#define KVDB_PER_ISA_TILES(name, amx, amx_emulated)             \
    {KVDB_LISTED_IF(KVDB_WITH_AVX512_BF16, amx),                \
     KVDB_LISTED_IF(KVDB_WITH_AVX512_BF16, name##_avx512_bf16), \
     KVDB_LISTED_IF(KVDB_WITH_AVX512, name##_avx512),           \
     KVDB_LISTED_IF(KVDB_WITH_AVX2, name##_avx2),               \
     nullptr,                                                   \
     KVDB_LISTED_IF(KVDB_WITH_PORTABLE, name##_portable),       \
     KVDB_LISTED_IF(KVDB_WITH_AVX512_BF16, amx_emulated)}
#elif defined(__aarch64__)
#define KVDB_DECLARE_PER_ISA(Kernels, name) extern const Kernels name##_neon, name##_portable
#define KVDB_PER_ISA_TILES(name, amx, amx_emulated) \
    {nullptr, nullptr, nullptr, nullptr, &name##_neon, &name##_portable, nullptr}
#else
#define KVDB_DECLARE_PER_ISA(Kernels, name) extern const Kernels name##_portable
#define KVDB_PER_ISA_TILES(name, amx, amx_emulated) \
    {nullptr, nullptr, nullptr, nullptr, nullptr, &name##_portable, nullptr}
#endif
#define KVDB_PER_ISA(name) KVDB_PER_ISA_TILES(name, name##_avx512_bf16, name##_avx512_bf16)

}  // namespace kvdb
