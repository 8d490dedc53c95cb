#include "simd/neon.h"

#include "../coarse/table.h"
#include "../flat/table.h"
#include "../graph/table.h"
#include "../score/table.h"

namespace kvdb::indexes {

const ScoreKernels score_neon = ScoreTable<simd::Neon>::kernels;
const FlatKernels flat_neon = FlatTable<simd::Neon>::kernels;
const CoarseKernels coarse_neon = CoarseTable<simd::Neon>::kernels;
const GraphKernels graph_neon = GraphTable<simd::Neon>::kernels;

}  // namespace kvdb::indexes
