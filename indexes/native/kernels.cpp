// The kernels of every index, one of each for every instruction set that is compiled in.
#include "coarse/kernels.h"

#include "flat/kernels.h"
#include "graph/kernels.h"
#include "quantized/kernels.h"
#include "score/kernels.h"

namespace kvdb::indexes {

const coarse::CoarseKernels& coarse::coarse_kernels() {
    static constexpr PerIsa<CoarseKernels> kernels{
        KVDB_PER_ISA_TILES(coarse, coarse_amx, coarse_amx_emulated)};
    return kernels.current(Operation::scan);
}

const flat::FlatKernels& flat::flat_kernels() {
    static constexpr PerIsa<FlatKernels> kernels{KVDB_PER_ISA(flat)};
    return kernels.current(Operation::scan);
}

const graph::GraphKernels& graph::graph_kernels() {
    static constexpr PerIsa<GraphKernels> kernels{KVDB_PER_ISA(graph)};
    return kernels.current(Operation::scan);
}

const quantized::QuantizedKernels& quantized::quantized_kernels() {
    static constexpr PerIsa<QuantizedKernels> kernels{
        KVDB_PER_ISA_TILES(quantized, quantized_amx, quantized_amx_emulated)};
    return kernels.current(Operation::scan);
}

const ScoreKernels& score_kernels() {
    static constexpr PerIsa<ScoreKernels> kernels{KVDB_PER_ISA(score)};
    return kernels.current(Operation::gather);
}

}  // namespace kvdb::indexes
