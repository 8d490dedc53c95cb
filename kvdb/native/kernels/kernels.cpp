#include "kernels.h"

namespace kvdb {

namespace {

constexpr PerIsa<Kernels> kPerIsa{KVDB_PER_ISA_TILES(kernels, kernels_amx, kernels_amx_emulated)};

}  // namespace

const Kernels& current_kernels() {
    return kPerIsa.current();
}

const Kernels& current_kernels(Operation operation) {
    return kPerIsa.current(operation);
}

}  // namespace kvdb
