#include "simd/avx2.h"

#include "../kernels/kernels.h"
#include "../kernels/table.h"

namespace kvdb {

const Kernels kernels_avx2 = kernels::Table<simd::Avx2>::kernels;

}  // namespace kvdb
