// Checksums of blocks, for files on disk.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvdb {

// The CRC-32C (Castagnoli; RFC 3720) of `nbytes` bytes at each of `count` addresses. On one thread.
void crc32c(const std::uint64_t* addresses, std::int64_t count, std::size_t nbytes,
            std::uint32_t* out);

}  // namespace kvdb
