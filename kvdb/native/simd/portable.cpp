#include "simd/portable.h"

#include "../kernels.h"
#include "../kernels/table.h"

namespace kvdb {

const Kernels kernels_portable = kernels::Table<simd::Portable>::kernels;

}  // namespace kvdb
