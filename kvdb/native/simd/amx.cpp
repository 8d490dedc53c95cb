#include "simd/amx.h"

#include "../kernels/kernels.h"
#include "../kernels/table.h"

namespace kvdb {

const Kernels kernels_amx = kernels::Table<simd::Amx>::kernels;

}  // namespace kvdb
