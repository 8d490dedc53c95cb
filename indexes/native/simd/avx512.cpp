#include "simd/avx512.h"

#include "../coarse/table.h"
#include "../flat/table.h"
#include "../graph/table.h"
#include "../quantized/table.h"
#include "../score/table.h"

namespace kvdb::indexes {

const ScoreKernels score_avx512 = ScoreTable<simd::Avx512>::kernels;
const flat::FlatKernels flat::flat_avx512 = flat::FlatTable<simd::Avx512>::kernels;
const coarse::CoarseKernels coarse::coarse_avx512 = coarse::CoarseTable<simd::Avx512>::kernels;
const graph::GraphKernels graph::graph_avx512 = graph::GraphTable<simd::Avx512>::kernels;
const quantized::QuantizedKernels quantized::quantized_avx512 =
    quantized::QuantizedTable<simd::Avx512>::kernels;

}  // namespace kvdb::indexes
