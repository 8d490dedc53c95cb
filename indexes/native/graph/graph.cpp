#include "kernels.h"

namespace kvdb::indexes {

const GraphKernels& graph_kernels() {
    static constexpr PerIsa<GraphKernels> kernels{KVDB_PER_ISA(graph)};
    return kernels.current();
}

}  // namespace kvdb::indexes
