#include "../coarse/table.h"
#include "simd/amx.h"

namespace kvdb::indexes::coarse {

const CoarseKernels coarse_amx_emulated = CoarseTable<simd::AmxEmulated>::kernels;

}  // namespace kvdb::indexes::coarse
