#include "file_reads.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include "io_ring.h"

namespace kvdb {
namespace {

constexpr std::uint32_t kReadMax = 1 << 20;  // longer reads are no faster
constexpr std::size_t kThreadsMax = 16;
constexpr std::size_t kReadsOfAThread = 4;  // fewer are not worth a thread

// Neighbours are one read.
std::vector<FileRead> joined(const std::uint64_t* offsets, const std::uint64_t* addresses,
                             std::int64_t count) {
    std::vector<FileRead> reads;
    for (std::int64_t i = 0; i < count; ++i) {
        if (!reads.empty()) {
            FileRead& last = reads.back();
            if (last.at + last.nbytes == offsets[i] && last.address + last.nbytes == addresses[i] &&
                last.nbytes < kReadMax) {
                last.nbytes += kFilePage;
                continue;
            }
        }
        reads.push_back({offsets[i], addresses[i], kFilePage});
    }
    return reads;
}

// A file system may want other multiples than pages for reads past its cache: then with it.
bool without_direct(int file) {
#if defined(O_DIRECT)
    const int flags = fcntl(file, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) && fcntl(file, F_SETFL, flags & ~O_DIRECT) == 0;
#else
    (void)file;
    return false;
#endif
}

// Read all of it here; the number of the error, or 0.
int read_whole(int file, FileRead read) {
    while (read.nbytes > 0) {
        const ssize_t done = pread(file, reinterpret_cast<void*>(read.address), read.nbytes,
                                   static_cast<off_t>(read.at));
        if (done == 0) return EIO;  // the file ends
        if (done < 0) {
            if (errno == EINTR || (errno == EINVAL && without_direct(file))) continue;
            return errno;
        }
        read.at += static_cast<std::uint64_t>(done);
        read.address += static_cast<std::uint64_t>(done);
        read.nbytes -= static_cast<std::uint32_t>(done);
    }
    return 0;
}

// What the system did not finish is finished here, which also finds out why it did not.
int by_ring(IoRing& ring, int file, const std::vector<FileRead>& reads) {
    int error = 0;
    std::size_t next = 0;
    while (ring.under_way() > 0 || (next < reads.size() && !error)) {
        for (; next < reads.size() && !error && !ring.full(); ++next) {
            ring.add(file, reads[next], next);
        }
        ring.wait([&](std::uint64_t tag, std::int32_t result) {
            if (result == static_cast<std::int32_t>(reads[tag].nbytes) || error) return;
            error = read_whole(file, reads[tag]);
        });
    }
    return error;
}

int by_threads(int file, const std::vector<FileRead>& reads) {
    std::atomic<std::size_t> next{0};
    std::atomic<int> error{0};
    const auto work = [&] {
        for (std::size_t i = next++; i < reads.size() && !error; i = next++) {
            if (const int failed = read_whole(file, reads[i])) error = failed;
        }
    };
    std::vector<std::jthread> others;
    try {
        const std::size_t threads = std::min(kThreadsMax, reads.size() / kReadsOfAThread);
        for (std::size_t i = 1; i < threads; ++i) others.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads: fewer do it
    }
    work();
    others.clear();
    return error;
}

}  // namespace

void read_pages(int file, const std::uint64_t* offsets, const std::uint64_t* addresses,
                std::int64_t count, ReadWay way) {
    const std::vector<FileRead> reads = joined(offsets, addresses, count);
    const bool many = reads.size() > 1;
    const IoRing::Borrowed ring = many && way == ReadWay::ring ? IoRing::borrow() : nullptr;
    const int error = ring ? by_ring(*ring, file, reads) : by_threads(file, reads);
    if (error) throw std::system_error(error, std::generic_category());
}

}  // namespace kvdb
