#pragma once

#include "../blocks.h"
#include "isa.h"

namespace kvdb::indexes {

struct FlatKernels {
    int placeholder;
};

KVDB_DECLARE_PER_ISA(FlatKernels, flat);

const FlatKernels& flat_kernels();

}  // namespace kvdb::indexes
