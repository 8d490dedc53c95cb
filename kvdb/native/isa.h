// Which instruction set the kernels use: chosen when the program starts, forced by KVDB_ISA.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"

namespace kvdb {

// One of each per simd/<isa>.cpp that was compiled in. Constant-initialised.
extern const Kernels kernels_avx512_bf16;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx2;
extern const Kernels kernels_neon;
extern const Kernels kernels_portable;

// What this machine can run, best first. The last is always "portable".
std::vector<std::string> isas();

// The one in use.
const Kernels& current_kernels();
std::string isa();

// Throws std::invalid_argument if `name` is unknown or this machine cannot run it. Calls that are
// already running finish with what they started with.
void set_isa(std::string_view name);

}  // namespace kvdb
