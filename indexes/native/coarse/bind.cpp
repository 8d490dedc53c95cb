#include "../bind.h"
#include "kernels.h"

namespace kvdb::indexes {

void bind_coarse(nb::module_&) {}

}  // namespace kvdb::indexes
