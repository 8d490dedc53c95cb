#include "avx512.h"

#include "../isa.h"
#include "../kernels/table.h"

namespace kvdb {

const Kernels kernels_avx512 = kernels::Table<simd::Avx512>::kernels;

}  // namespace kvdb
