// Clusters of the keys of one segment.
#pragma once

#include <cstdint>
#include <vector>

#include "representatives.h"

namespace kvdb::indexes::coarse {

// The cluster of each token, by k-means on the keys minus their mean. Equal keys give equal
// clusters.
std::vector<std::int32_t> cluster(const SegmentKeys& keys, const ClusterOptions& options);

}  // namespace kvdb::indexes::coarse
