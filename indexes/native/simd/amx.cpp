#include "simd/amx.h"

#include "../coarse/table.h"

namespace kvdb::indexes::coarse {

const CoarseKernels coarse_amx = CoarseTable<simd::Amx>::kernels;

}  // namespace kvdb::indexes::coarse
