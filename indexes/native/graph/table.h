#pragma once

#include "kernels.h"
#include "simd/generic.h"

namespace kvdb::indexes {

template <class Isa>
struct GraphTable {
    static constexpr GraphKernels kernels{0};
};

}  // namespace kvdb::indexes
