#include "shared_ring.h"

#include <algorithm>
#include <cstring>
#include <thread>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#endif

namespace kvdb {
namespace {

using Clock = std::chrono::steady_clock;

// A wait that is expected to be shorter than to sleep and wake is spun through, and so is one up to
// kSpinSpare where a processor has nothing else to do. On a busy processor a spin takes from the
// other end the time that it waits for.
constexpr std::chrono::microseconds kSpin{50}, kSpinSpare{5000};
constexpr int kRemembered = 4;  // waits, of which the mean is the next one's expectation
constexpr int kPauses = 16;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

#ifdef __linux__
void futex_wait(std::uint32_t* word, std::uint32_t seen, std::chrono::nanoseconds wait) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(wait);
    timespec limit{};
    limit.tv_sec = static_cast<time_t>(seconds.count());
    limit.tv_nsec = static_cast<long>((wait - seconds).count());
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(std::uint32_t* word) {
    syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}
#else
void futex_wait(std::uint32_t*, std::uint32_t, std::chrono::nanoseconds wait) {
    std::this_thread::sleep_for(
        std::min<std::chrono::nanoseconds>(wait, std::chrono::microseconds{50}));
}

void futex_wake(std::uint32_t*) {}
#endif

}  // namespace

SharedRing::SharedRing(std::byte* memory, bool is_server)
    : memory_(memory),
      is_server_(is_server),
      out_(reinterpret_cast<Position*>(memory) + (is_server ? 1 : 0)),
      in_(reinterpret_cast<Position*>(memory) + (is_server ? 0 : 1)) {}

bool SharedRing::send(const std::byte* message) {
    if (!is_server_ && sent_ - received_ >= kSlots) return false;
    const std::size_t at = is_server_ ? kAnswersAt : kRequestsAt;
    std::memcpy(memory_ + at + (sent_ % kSlots) * sent_bytes(), message, sent_bytes());
    std::atomic_ref(out_->sent).store(++sent_, std::memory_order_seq_cst);
    if (std::atomic_ref(out_->waiting).load(std::memory_order_seq_cst)) futex_wake(&out_->sent);
    return true;
}

SharedRing::Received SharedRing::receive(std::byte* message, std::chrono::nanoseconds wait) {
    const auto begin = Clock::now(), end = begin + wait;
    const auto most = spare_.load(std::memory_order_relaxed) ? kSpinSpare : kSpin;
    if (arrived() == received_ && expected_ <= most) spin(std::min(end, begin + 2 * most));
    while (arrived() == received_ && !stopped()) {
        const auto left = end - Clock::now();
        if (left <= std::chrono::nanoseconds::zero()) {
            expected_ = 4 * kSpinSpare;
            return Received::nothing;
        }
        sleep(left);
    }
    expected_ +=
        (std::min<std::chrono::nanoseconds>(Clock::now() - begin, 4 * kSpinSpare) - expected_) /
        kRemembered;
    const std::uint32_t there = arrived() - received_;
    if (there == 0) return Received::nothing;  // stopped
    if (there > kSlots) return Received::broken;
    const std::size_t at = is_server_ ? kRequestsAt : kAnswersAt;
    std::memcpy(message, memory_ + at + (received_ % kSlots) * received_bytes(), received_bytes());
    ++received_;
    return Received::message;
}

void SharedRing::stop() {
    stopped_.store(true, std::memory_order_release);
    futex_wake(&in_->sent);
}

// It never yields: the scheduler holds that against a thread when it is to wake from a sleep.
void SharedRing::spin(Clock::time_point end) const {
    while (arrived() == received_ && !stopped() && Clock::now() < end) {
        for (int i = 0; i < kPauses; ++i) pause();
    }
}

void SharedRing::sleep(std::chrono::nanoseconds wait) {
    const std::atomic_ref waiting(in_->waiting);
    waiting.store(1, std::memory_order_seq_cst);
    if (arrived() == received_ && !stopped()) futex_wait(&in_->sent, received_, wait);
    waiting.store(0, std::memory_order_seq_cst);
}

std::uint32_t SharedRing::arrived() const {
    return std::atomic_ref(in_->sent).load(std::memory_order_seq_cst);
}

}  // namespace kvdb
