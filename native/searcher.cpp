#include "searcher.h"

namespace kvdb::indexes {

Searcher::~Searcher() = default;  // here, so that all modules share one table of its functions

}  // namespace kvdb::indexes
