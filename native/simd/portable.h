#pragma once

#include "generic.h"

namespace kvdb::simd {

struct Portable : Generic<Portable, 4> {};

}  // namespace kvdb::simd
