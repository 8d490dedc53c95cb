// Marks what the shared library `kvdb_base` shows to the extension modules; all else is hidden.
#pragma once

#define KVDB_BASE __attribute__((visibility("default")))
