// Two rings of fixed-size messages between two processes, at the start of memory that they share:
// requests from the client to the server, and answers back.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kvdb {

// One end of both rings. One thread sends and receives; `stop` may come from another.
//
// Nothing that the other end writes is trusted: positions of this end are kept outside of the
// shared memory, and a message is copied once, before anyone looks at it. Where nobody waits,
// sending is a copy and a store; who expects to wait long sleeps on a futex, others spin before.
class SharedRing {
  public:
    static constexpr std::uint32_t kSlots = 64;
    static constexpr std::size_t kRequestBytes = 128;
    static constexpr std::size_t kAnswerBytes = 64;
    static constexpr std::size_t kRequestsAt = 4096;
    static constexpr std::size_t kAnswersAt = kRequestsAt + kSlots * kRequestBytes;
    static constexpr std::size_t kBytes = kAnswersAt + kSlots * kAnswerBytes;  // of both rings

    enum class Received { message, nothing, broken };

    // memory: at least kBytes, zeros at first, aligned to a page.
    SharedRing(std::byte* memory, bool is_server);

    std::size_t sent_bytes() const { return is_server_ ? kAnswerBytes : kRequestBytes; }
    std::size_t received_bytes() const { return is_server_ ? kRequestBytes : kAnswerBytes; }

    // Sends a message of `sent_bytes`. False where as many are under way as there are slots.
    bool send(const std::byte* message);

    // Waits so long for a message of `received_bytes`. Broken: the other end claims to have sent
    // more than there are slots.
    Received receive(std::byte* message, std::chrono::nanoseconds wait);

    // Whether a processor has nothing to do while this end waits.
    void set_spare(bool spare) { spare_.store(spare, std::memory_order_relaxed); }

    // Nobody waits at this end any more.
    void stop();
    bool stopped() const { return stopped_.load(std::memory_order_acquire); }

  private:
    // Where one direction stands, in the shared memory.
    struct Position {
        alignas(64) std::uint32_t sent;
        std::uint32_t waiting;
    };

    void spin(std::chrono::steady_clock::time_point end) const;
    void sleep(std::chrono::nanoseconds wait);
    std::uint32_t arrived() const;

    std::byte* const memory_;
    const bool is_server_;
    Position* const out_;
    Position* const in_;
    std::uint32_t sent_ = 0, received_ = 0;
    std::chrono::nanoseconds expected_{0};
    std::atomic<bool> stopped_{false}, spare_{false};
};

}  // namespace kvdb
