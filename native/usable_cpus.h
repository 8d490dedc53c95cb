// How many processors this process may use, as the system and the container around it say.
#pragma once

#include <string>
#include <vector>

#include "export.h"

namespace kvdb {

// The processors of this process's affinity, but no more than its CPU quota is worth, and at least
// one. A part of a processor is not counted, because a thread that uses up a quota is stopped until
// the next period.
KVDB_BASE int usable_cpus();

// The smallest CPU quota of the control groups (version 2 or 1) that this process is in, in
// processors; infinity without one. root: the folder below which proc/ and sys/ lie.
KVDB_BASE double cpu_quota(const std::string& root);

// The numbers that a list as "0-2,5" names; none where it is no such list.
std::vector<int> cpu_list(const std::string& text);

}  // namespace kvdb
