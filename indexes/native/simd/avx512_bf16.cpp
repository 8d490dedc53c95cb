#include "simd/avx512_bf16.h"

#include "../coarse/table.h"
#include "../flat/table.h"
#include "../graph/table.h"
#include "../quantized/table.h"
#include "../score/table.h"

namespace kvdb::indexes {

const ScoreKernels score_avx512_bf16 = ScoreTable<simd::Avx512Bf16>::kernels;
const flat::FlatKernels flat::flat_avx512_bf16 = flat::FlatTable<simd::Avx512Bf16>::kernels;
const coarse::CoarseKernels coarse::coarse_avx512_bf16 =
    coarse::CoarseTable<simd::Avx512Bf16>::kernels;
const graph::GraphKernels graph::graph_avx512_bf16 = graph::GraphTable<simd::Avx512Bf16>::kernels;
const quantized::QuantizedKernels quantized::quantized_avx512_bf16 =
    quantized::QuantizedTable<simd::Avx512Bf16>::kernels;

}  // namespace kvdb::indexes
