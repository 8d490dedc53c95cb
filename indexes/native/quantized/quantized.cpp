#include "kernels.h"

namespace kvdb::indexes::quantized {

const QuantizedKernels& quantized_kernels() {
    static constexpr PerIsa<QuantizedKernels> kernels{
        KVDB_PER_ISA_TILES(quantized, quantized_amx, quantized_amx_emulated)};
    return kernels.current(Operation::scan);
}

}  // namespace kvdb::indexes::quantized
