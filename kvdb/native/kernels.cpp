#include "kernels.h"

namespace kvdb {

namespace {

constexpr PerIsa<Kernels> kPerIsa{KVDB_PER_ISA(kernels)};

}  // namespace

const Kernels& current_kernels() {
    return kPerIsa.current();
}

const Kernels& current_kernels(Operation operation) {
    return kPerIsa.current(operation);
}

}  // namespace kvdb
