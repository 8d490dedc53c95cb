#pragma once

#include "kernels.h"
#include "simd/generic.h"

namespace kvdb::indexes {

template <class Isa>
struct CoarseTable {
    static constexpr CoarseKernels kernels{0};
};

}  // namespace kvdb::indexes
