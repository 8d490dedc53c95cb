#include "simd/avx512.h"

#include "../kernels/kernels.h"
#include "../kernels/table.h"

namespace kvdb {

const Kernels kernels_avx512 = kernels::Table<simd::Avx512>::kernels;

}  // namespace kvdb
