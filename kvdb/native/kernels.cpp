#include "kernels.h"

namespace kvdb {

const Kernels& current_kernels() {
    static constexpr PerIsa<Kernels> kernels{KVDB_PER_ISA(kernels)};
    return kernels.current();
}

}  // namespace kvdb
