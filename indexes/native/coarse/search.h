// Searching pages: representatives first, then the keys of the candidate pages.
#pragma once

#include <cstdint>
#include <vector>

#include "pages.h"
#include "query_rows.h"

namespace kvdb::indexes::coarse {

// margin: how much of its reach a page is given.
struct CoarseOptions : SearchOptions {
    bool exact;  // with margin 1: overlook nothing, however much is read
};

SearchResult search(const Blocks& blocks, const std::vector<Pages>& batches,
                    const QueryRows& queries, const CoarseOptions& options);

}  // namespace kvdb::indexes::coarse
