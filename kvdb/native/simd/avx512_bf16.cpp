#include "simd/avx512_bf16.h"

#include "../kernels/kernels.h"
#include "../kernels/table.h"

namespace kvdb {

const Kernels kernels_avx512_bf16 = kernels::Table<simd::Avx512Bf16>::kernels;

}  // namespace kvdb
