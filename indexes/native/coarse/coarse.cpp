#include "kernels.h"

namespace kvdb::indexes::coarse {

const CoarseKernels& coarse_kernels() {
    static constexpr PerIsa<CoarseKernels> kernels{KVDB_PER_ISA(coarse)};
    return kernels.current(Operation::scan);
}

}  // namespace kvdb::indexes::coarse
