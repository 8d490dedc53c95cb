// One search for the queries of several steps that ask one index for the same.
#pragma once

#include <cstdint>
#include <vector>

#include "step_run.h"

namespace kvdb {

// Makes the next search of these steps, whose plans ask alike.
void search_together(const std::vector<StepRun*>& steps, const StepPlan& plan);

}  // namespace kvdb
