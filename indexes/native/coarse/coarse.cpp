#include "kernels.h"

namespace kvdb::indexes::coarse {

const CoarseKernels& coarse_kernels() {
    static constexpr PerIsa<CoarseKernels> kernels{
        KVDB_PER_ISA_TILES(coarse, coarse_amx, coarse_amx_emulated)};
    return kernels.current(Operation::scan);
}

}  // namespace kvdb::indexes::coarse
