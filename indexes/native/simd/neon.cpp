#include "simd/neon.h"

#include "../coarse/table.h"
#include "../flat/table.h"
#include "../graph/table.h"
#include "../quantized/table.h"
#include "../score/table.h"

namespace kvdb::indexes {

const ScoreKernels score_neon = ScoreTable<simd::Neon>::kernels;
const flat::FlatKernels flat::flat_neon = flat::FlatTable<simd::Neon>::kernels;
const coarse::CoarseKernels coarse::coarse_neon = coarse::CoarseTable<simd::Neon>::kernels;
const graph::GraphKernels graph::graph_neon = graph::GraphTable<simd::Neon>::kernels;
const quantized::QuantizedKernels quantized::quantized_neon =
    quantized::QuantizedTable<simd::Neon>::kernels;

}  // namespace kvdb::indexes
