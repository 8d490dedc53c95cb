#include "simd/amx.h"

#include "../coarse/table.h"
#include "../quantized/table.h"

namespace kvdb::indexes {

const coarse::CoarseKernels coarse::coarse_amx = coarse::CoarseTable<simd::Amx>::kernels;
const quantized::QuantizedKernels quantized::quantized_amx =
    quantized::QuantizedTable<simd::Amx>::kernels;

}  // namespace kvdb::indexes
