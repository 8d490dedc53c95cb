#include "simd/portable.h"

#include "../coarse/table.h"
#include "../flat/table.h"
#include "../graph/table.h"
#include "../score/table.h"

namespace kvdb::indexes {

const ScoreKernels score_portable = ScoreTable<simd::Portable>::kernels;
const FlatKernels flat_portable = FlatTable<simd::Portable>::kernels;
const CoarseKernels coarse_portable = CoarseTable<simd::Portable>::kernels;
const GraphKernels graph_portable = GraphTable<simd::Portable>::kernels;

}  // namespace kvdb::indexes
