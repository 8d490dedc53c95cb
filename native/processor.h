// Families of processors, and what is fastest on each: used where nothing was measured.
#pragma once

#include "export.h"
#include "isa.h"

namespace kvdb {

struct Family {
    const char* name;
    Isa kernels[kOperations];  // in the order of Operation
    Isa untiled;               // instead of amx, where the system hides its tiles
};

// This processor's, or null where the table does not have it: then everything uses the best
// instruction set.
KVDB_BASE const Family* processor_family();

}  // namespace kvdb
