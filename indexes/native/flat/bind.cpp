#include "../bind.h"
#include "kernels.h"

namespace kvdb::indexes {

void bind_flat(nb::module_&) {}

}  // namespace kvdb::indexes
