// Searches of the quantized index.
#pragma once

#include "kernels.h"
#include "query_rows.h"

namespace kvdb::indexes::quantized {

// margin: the share of the bound on a code's error that a token is given.
SearchResult search(const Blocks& blocks, const Codes& codes, const QueryRows& queries,
                    const SearchOptions& options);

}  // namespace kvdb::indexes::quantized
