// Work that must not slow other work down.
#pragma once

namespace kvdb {

// From now on, calls from this thread run on a second pool. Its workers are started by such threads
// alone and so, on Linux, have their priority, as the first pool's have that of those who ask.
void work_in_background();

}  // namespace kvdb
