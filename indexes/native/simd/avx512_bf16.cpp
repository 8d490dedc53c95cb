#include "simd/avx512_bf16.h"

#include "../coarse/table.h"
#include "../flat/table.h"
#include "../graph/table.h"
#include "../score/table.h"

namespace kvdb::indexes {

const ScoreKernels score_avx512_bf16 = ScoreTable<simd::Avx512Bf16>::kernels;
const FlatKernels flat_avx512_bf16 = FlatTable<simd::Avx512Bf16>::kernels;
const CoarseKernels coarse_avx512_bf16 = CoarseTable<simd::Avx512Bf16>::kernels;
const GraphKernels graph_avx512_bf16 = GraphTable<simd::Avx512Bf16>::kernels;

}  // namespace kvdb::indexes
