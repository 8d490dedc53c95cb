// Whether this process may use AMX, the matrix tiles of Intel's processors.
#pragma once

namespace kvdb {

// True if processor and operating system have tiles of bfloat16 and the system gave its permission,
// which the first call asks for. It holds for all threads of the process, and for forked children.
bool amx_permitted();

}  // namespace kvdb
