#include "simd/avx512.h"

#include "../coarse/table.h"
#include "../flat/table.h"
#include "../graph/table.h"
#include "../score/table.h"

namespace kvdb::indexes {

const ScoreKernels score_avx512 = ScoreTable<simd::Avx512>::kernels;
const FlatKernels flat_avx512 = FlatTable<simd::Avx512>::kernels;
const CoarseKernels coarse_avx512 = CoarseTable<simd::Avx512>::kernels;
const GraphKernels graph_avx512 = GraphTable<simd::Avx512>::kernels;

}  // namespace kvdb::indexes
