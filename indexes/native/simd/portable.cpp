#include "simd/portable.h"

#include "../coarse/table.h"
#include "../flat/table.h"
#include "../graph/table.h"
#include "../quantized/table.h"
#include "../score/table.h"

namespace kvdb::indexes {

const ScoreKernels score_portable = ScoreTable<simd::Portable>::kernels;
const flat::FlatKernels flat::flat_portable = flat::FlatTable<simd::Portable>::kernels;
const coarse::CoarseKernels coarse::coarse_portable = coarse::CoarseTable<simd::Portable>::kernels;
const graph::GraphKernels graph::graph_portable = graph::GraphTable<simd::Portable>::kernels;
const quantized::QuantizedKernels quantized::quantized_portable =
    quantized::QuantizedTable<simd::Portable>::kernels;

}  // namespace kvdb::indexes
