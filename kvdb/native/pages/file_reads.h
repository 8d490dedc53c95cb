// Many small reads of one file at a time.
#pragma once

#include <cstdint>

namespace kvdb {

constexpr std::uint32_t kFilePage = 4096;

// Who carries reads out: the system, from a queue, where it has one and lets this process use it;
// or threads, each of which waits for its own.
enum class ReadWay : int { ring = 0, threads = 1 };

// Fill pages of kFilePage bytes at these addresses from these offsets of the file. Pages that are
// neighbours in both, as they stand, are one read. Returns when nothing is under way any more.
// Throws std::system_error; then the contents of the memory are unspecified.
void read_pages(int file, const std::uint64_t* offsets, const std::uint64_t* addresses,
                std::int64_t count, ReadWay way);

}  // namespace kvdb
