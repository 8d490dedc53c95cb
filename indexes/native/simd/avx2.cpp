#include "simd/avx2.h"

#include "../coarse/table.h"
#include "../flat/table.h"
#include "../graph/table.h"
#include "../score/table.h"

namespace kvdb::indexes {

const ScoreKernels score_avx2 = ScoreTable<simd::Avx2>::kernels;
const FlatKernels flat_avx2 = FlatTable<simd::Avx2>::kernels;
const CoarseKernels coarse_avx2 = CoarseTable<simd::Avx2>::kernels;
const GraphKernels graph_avx2 = GraphTable<simd::Avx2>::kernels;

}  // namespace kvdb::indexes
