#include "portable.h"

#include "../isa.h"
#include "../kernels/table.h"

namespace kvdb {

const Kernels kernels_portable = kernels::Table<simd::Portable>::kernels;

}  // namespace kvdb
