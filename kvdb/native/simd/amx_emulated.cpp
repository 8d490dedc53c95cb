#include "../kernels/kernels.h"
#include "../kernels/table.h"
#include "simd/amx.h"

namespace kvdb {

const Kernels kernels_amx_emulated = kernels::Table<simd::AmxEmulated>::kernels;

}  // namespace kvdb
