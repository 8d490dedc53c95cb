#include "simd/avx2.h"

#include "../coarse/table.h"
#include "../flat/table.h"
#include "../graph/table.h"
#include "../quantized/table.h"
#include "../score/table.h"

namespace kvdb::indexes {

const ScoreKernels score_avx2 = ScoreTable<simd::Avx2>::kernels;
const flat::FlatKernels flat::flat_avx2 = flat::FlatTable<simd::Avx2>::kernels;
const coarse::CoarseKernels coarse::coarse_avx2 = coarse::CoarseTable<simd::Avx2>::kernels;
const graph::GraphKernels graph::graph_avx2 = graph::GraphTable<simd::Avx2>::kernels;
const quantized::QuantizedKernels quantized::quantized_avx2 =
    quantized::QuantizedTable<simd::Avx2>::kernels;

}  // namespace kvdb::indexes
