// Marks the symbols of the shared library `kvdb_base` that the extension modules may use; all
// others are hidden.
#pragma once

#define KVDB_BASE __attribute__((visibility("default")))
