#include "../coarse/table.h"
#include "../quantized/table.h"
#include "simd/amx.h"

namespace kvdb::indexes {

const coarse::CoarseKernels coarse::coarse_amx_emulated =
    coarse::CoarseTable<simd::AmxEmulated>::kernels;
const quantized::QuantizedKernels quantized::quantized_amx_emulated =
    quantized::QuantizedTable<simd::AmxEmulated>::kernels;

}  // namespace kvdb::indexes
