#include "io_ring.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <vector>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvdb {

#if defined(__linux__) && __has_include(<linux/io_uring.h>) && defined(SYS_io_uring_setup)

// The rings that lie in memory which the process shares with the system. `head` and `tail` count
// for ever; an entry lies at its number modulo the length.
struct IoRing::Queues {
    io_uring_params params{};
    void* rings = MAP_FAILED;
    void* entries = MAP_FAILED;
    std::size_t rings_nbytes = 0, entries_nbytes = 0;

    std::uint32_t* at(std::uint32_t offset) const {
        return reinterpret_cast<std::uint32_t*>(static_cast<char*>(rings) + offset);
    }

    bool map(int ring) {
        const std::size_t sent = params.sq_off.array + params.sq_entries * sizeof(std::uint32_t);
        const std::size_t ended = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        rings_nbytes = std::max(sent, ended);
        entries_nbytes = params.sq_entries * sizeof(io_uring_sqe);
        rings = mapped(ring, rings_nbytes, IORING_OFF_SQ_RING);
        entries = mapped(ring, entries_nbytes, IORING_OFF_SQES);
        return rings != MAP_FAILED && entries != MAP_FAILED;
    }

    ~Queues() {
        if (rings != MAP_FAILED) munmap(rings, rings_nbytes);
        if (entries != MAP_FAILED) munmap(entries, entries_nbytes);
    }

  private:
    static void* mapped(int ring, std::size_t nbytes, std::uint64_t offset) {
        return mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                    static_cast<off_t>(offset));
    }
};

IoRing::IoRing() : queues_(std::make_unique<Queues>()) {
    ring_ = static_cast<int>(syscall(SYS_io_uring_setup, kDepth, &queues_->params));
    if (ring_ < 0) {
        refused_ = errno == ENOSYS || errno == EPERM || errno == EACCES;
        return;
    }
    const bool one_mapping = queues_->params.features & IORING_FEAT_SINGLE_MMAP;  // Linux 5.4
    // A sandbox may allow the one call and forbid the other.
    refused_ = !one_mapping || syscall(SYS_io_uring_enter, ring_, 0, 0, 0, nullptr, 0) < 0;
    if (!refused_ && queues_->map(ring_)) return;
    close(ring_);
    ring_ = -1;
}

IoRing::~IoRing() {
    if (ring_ >= 0) close(ring_);
}

void IoRing::add(int file, const FileRead& read, std::uint64_t tag) {
    const std::uint32_t tail = *queues_->at(queues_->params.sq_off.tail);
    const std::uint32_t place = tail & *queues_->at(queues_->params.sq_off.ring_mask);
    io_uring_sqe& entry = static_cast<io_uring_sqe*>(queues_->entries)[place];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = IORING_OP_READ;
    entry.fd = file;
    entry.off = read.at;
    entry.addr = read.address;
    entry.len = read.nbytes;
    entry.user_data = tag;
    queues_->at(queues_->params.sq_off.array)[place] = place;
    std::atomic_ref<std::uint32_t>(*queues_->at(queues_->params.sq_off.tail))
        .store(tail + 1, std::memory_order_release);
    ++added_;
    ++under_way_;
}

void IoRing::enter() {
    const unsigned least = std::max(1u, under_way_ / 4);  // a few at a time: fewer system calls
    const long handed =
        syscall(SYS_io_uring_enter, ring_, added_, least, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (handed > 0) added_ -= static_cast<unsigned>(handed);
    // An interrupted call, or a system that is short of memory for the moment: what has ended is
    // taken, and the caller, who waits for all that is under way, comes again.
}

bool IoRing::take(std::uint64_t& tag, std::int32_t& result) {
    const auto& places = queues_->params.cq_off;
    std::uint32_t& head = *queues_->at(places.head);
    const std::uint32_t tail =
        std::atomic_ref<std::uint32_t>(*queues_->at(places.tail)).load(std::memory_order_acquire);
    if (head == tail) return false;
    const auto* ended = reinterpret_cast<const io_uring_cqe*>(queues_->at(places.cqes));
    const io_uring_cqe& entry = ended[head & *queues_->at(places.ring_mask)];
    tag = entry.user_data;
    result = entry.res;
    std::atomic_ref<std::uint32_t>(head).store(head + 1, std::memory_order_release);
    --under_way_;
    return true;
}

namespace {

std::int64_t this_process() {
    return getpid();
}

}  // namespace

#else

struct IoRing::Queues {};

IoRing::IoRing() = default;
IoRing::~IoRing() = default;
void IoRing::add(int, const FileRead&, std::uint64_t) {}
void IoRing::enter() {}
bool IoRing::take(std::uint64_t&, std::int32_t&) {
    return false;
}

namespace {

std::int64_t this_process() {
    return 0;
}

}  // namespace

#endif

namespace {

// Rings that nobody uses. A child of this process must not use those of its parent, with whom it
// shares the queues.
struct Idle {
    std::mutex lock;
    std::int64_t process = this_process();
    std::vector<std::unique_ptr<IoRing>> rings;
    bool none = false;  // the system has no rings, or lets this process have none
};

Idle& idle() {
    static Idle* rings = new Idle;  // never destroyed: threads may still read at the end
    return *rings;
}

}  // namespace

bool IoRing::full() const {
    return under_way_ == kDepth;
}

IoRing::Borrowed IoRing::borrow() {
    Idle& kept = idle();
    const std::lock_guard hold(kept.lock);
    if (kept.process != this_process()) {
        kept.rings.clear();
        kept.process = this_process();
    }
    if (kept.none) return nullptr;
    if (!kept.rings.empty()) {
        IoRing* ring = kept.rings.back().release();
        kept.rings.pop_back();
        return Borrowed(ring);
    }
    Borrowed ring(new IoRing);
    if (ring->ring_ >= 0) return ring;
    kept.none = ring->refused_;
    delete ring.release();
    return nullptr;
}

void IoRing::GiveBack::operator()(IoRing* ring) const {
    Idle& kept = idle();
    const std::lock_guard hold(kept.lock);
    kept.rings.emplace_back(ring);
}

}  // namespace kvdb
