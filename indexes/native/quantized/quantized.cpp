#include "kernels.h"

namespace kvdb::indexes::quantized {

const QuantizedKernels& quantized_kernels() {
    static constexpr PerIsa<QuantizedKernels> kernels{KVDB_PER_ISA(quantized)};
    return kernels.current(Operation::scan);
}

}  // namespace kvdb::indexes::quantized
