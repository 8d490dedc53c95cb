#pragma once

#include "../blocks.h"
#include "isa.h"

namespace kvdb::indexes {

struct GraphKernels {
    int placeholder;
};

KVDB_DECLARE_PER_ISA(GraphKernels, graph);

const GraphKernels& graph_kernels();

}  // namespace kvdb::indexes
