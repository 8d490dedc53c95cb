#include "simd/neon.h"

#include "../kernels/kernels.h"
#include "../kernels/table.h"

namespace kvdb {

const Kernels kernels_neon = kernels::Table<simd::Neon>::kernels;

}  // namespace kvdb
