#include "kernels.h"

namespace kvdb::indexes {

const FlatKernels& flat_kernels() {
    static constexpr PerIsa<FlatKernels> kernels{KVDB_PER_ISA(flat)};
    return kernels.current();
}

}  // namespace kvdb::indexes
