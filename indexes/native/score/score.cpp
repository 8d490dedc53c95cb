#include "kernels.h"

namespace kvdb::indexes {

const ScoreKernels& score_kernels() {
    static constexpr PerIsa<ScoreKernels> kernels{KVDB_PER_ISA(score)};
    return kernels.current(Operation::gather);
}

}  // namespace kvdb::indexes
