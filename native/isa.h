// Which instruction set the kernels use: chosen when the first module is loaded, for the whole
// process; forced by KVDB_ISA.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "export.h"

namespace kvdb {

enum class Isa : int { avx512_bf16, avx512, avx2, neon, portable };
inline constexpr int kIsas = 5;

// The instruction sets this machine can run, best first. The last is always "portable".
KVDB_BASE std::vector<std::string> isas();

// The one in use.
KVDB_BASE Isa current_isa();
KVDB_BASE std::string isa();

// Throws std::invalid_argument if `name` is unknown or this machine cannot run it. Calls under way
// finish with the instruction set they started with.
KVDB_BASE void set_isa(std::string_view name);

// One set of kernels for each instruction set; null where it is not compiled in.
template <class Kernels>
struct PerIsa {
    const Kernels* of[kIsas];
    const Kernels& current() const { return *of[static_cast<int>(current_isa())]; }
};

// Declares and lists `name`_avx2, `name`_portable and so on, one for each simd/<isa>.cpp that is
// compiled in.
#if defined(__x86_64__)
#define KVDB_DECLARE_PER_ISA(Kernels, name) \
    extern const Kernels name##_avx512_bf16, name##_avx512, name##_avx2, name##_portable
#define KVDB_PER_ISA(name) \
    {&name##_avx512_bf16, &name##_avx512, &name##_avx2, nullptr, &name##_portable}
#elif defined(__aarch64__)
#define KVDB_DECLARE_PER_ISA(Kernels, name) extern const Kernels name##_neon, name##_portable
#define KVDB_PER_ISA(name) {nullptr, nullptr, nullptr, &name##_neon, &name##_portable}
#else
#define KVDB_DECLARE_PER_ISA(Kernels, name) extern const Kernels name##_portable
#define KVDB_PER_ISA(name) {nullptr, nullptr, nullptr, nullptr, &name##_portable}
#endif

}  // namespace kvdb
