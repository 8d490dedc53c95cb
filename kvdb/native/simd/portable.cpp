#include "simd/portable.h"

#include "../kernels/kernels.h"
#include "../kernels/table.h"

namespace kvdb {

const Kernels kernels_portable = kernels::Table<simd::Portable>::kernels;

}  // namespace kvdb
