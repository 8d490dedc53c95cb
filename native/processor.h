// Families of processors, and what is fastest on each: used where nothing was measured.
#pragma once

#include <string>

#include "export.h"
#include "isa.h"

namespace kvdb {

// What a processor says of itself.
struct Processor {
    std::string vendor;  // as CPUID spells it: "GenuineIntel"
    unsigned family = 0, model = 0;
    bool avx512_bf16 = false;
};

struct Family {
    const char* name;
    Isa kernels[kOperations];  // in the order of Operation
    Isa untiled;               // instead of amx, where the system hides its tiles
};

KVDB_BASE Processor this_processor();

// The row of the table for a processor, or null where it has none: then everything uses the best
// instruction set.
KVDB_BASE const Family* family_of(const Processor& processor);

}  // namespace kvdb
