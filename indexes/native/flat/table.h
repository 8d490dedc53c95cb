#pragma once

#include "kernels.h"
#include "simd/generic.h"

namespace kvdb::indexes {

template <class Isa>
struct FlatTable {
    static constexpr FlatKernels kernels{0};
};

}  // namespace kvdb::indexes
