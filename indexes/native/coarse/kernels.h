#pragma once

#include "../blocks.h"
#include "isa.h"

namespace kvdb::indexes {

struct CoarseKernels {
    int placeholder;
};

KVDB_DECLARE_PER_ISA(CoarseKernels, coarse);

const CoarseKernels& coarse_kernels();

}  // namespace kvdb::indexes
