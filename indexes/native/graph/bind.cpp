#include "../bind.h"
#include "kernels.h"

namespace kvdb::indexes {

void bind_graph(nb::module_&) {}

}  // namespace kvdb::indexes
