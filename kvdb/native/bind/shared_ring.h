// An end of the rings of a shared region, as Python holds it.
#pragma once

#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "../transport/shared_records.h"
#include "../transport/shared_ring.h"
#include "bind.h"
#include "usable_cpus.h"

namespace kvdb {

using RegionArray = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A ring, and the memory that it lies in, which it keeps.
class PySharedRing {
  public:
    using Message = std::array<std::byte, SharedRing::kRequestBytes>;
    static constexpr double kSecondsMax = 3600.0;

    PySharedRing(const RegionArray& region, bool is_server)
        : region_(region), is_server_(is_server) {
        const auto address = reinterpret_cast<std::uintptr_t>(region.data());
        if (region.size() < SharedRing::kBytes || address % SharedRing::kRequestsAt) {
            fail("a region of " + std::to_string(region.size()) + " bytes; expected at least " +
                 std::to_string(SharedRing::kBytes) + ", from the start of a page");
        }
        ring_ =
            std::make_unique<SharedRing>(reinterpret_cast<std::byte*>(region.data()), is_server);
    }

    bool send(const nb::bytes& message) {
        if (message.size() != ring_->sent_bytes()) {
            fail("a message has " + std::to_string(message.size()) + " bytes; expected " +
                 std::to_string(ring_->sent_bytes()));
        }
        return ring_->send(reinterpret_cast<const std::byte*>(message.c_str()));
    }

    // None for nothing.
    nb::object receive(double seconds) {
        Message message;
        if (!next(message, seconds)) return nb::none();
        return nb::bytes(message.data(), ring_->received_bytes());
    }

    // Waits for a message. False for nothing.
    bool next(Message& message, double seconds) {
        if (!(seconds >= 0 && seconds <= kSecondsMax)) fail("expected 0 to 3600 seconds");
        if (kept_) {
            message = *kept_;
            kept_.reset();
            return true;
        }
        SharedRing::Received received;
        {
            const ReleaseGil release;
            const auto wait = std::chrono::nanoseconds(std::llround(seconds * 1e9));
            received = ring_->receive(message.data(), wait);
        }
        if (received == SharedRing::Received::message && !is_server_) look_at(message);
        if (received == SharedRing::Received::broken) {
            fail("the other end of a ring claims to have sent more messages than it has slots");
        }
        return received == SharedRing::Received::message;
    }

    // The next message is this one, which was received before.
    void keep(const Message& message) { kept_ = message; }

    // Where [offset, offset + nbytes) of the region lies; null where it does not.
    std::byte* at(std::uint64_t offset, std::uint64_t nbytes) const {
        if (offset > region_.size() || nbytes > region_.size() - offset) return nullptr;
        return reinterpret_cast<std::byte*>(region_.data()) + offset;
    }

    bool send(const void* message) { return ring_->send(static_cast<const std::byte*>(message)); }

    void stop() { ring_->stop(); }

    // What the last answer said of its times.
    std::array<float, 3> times_us() const {
        return {answer_.queue_us, answer_.engine_us, answer_.kernel_us};
    }

  private:
    void look_at(const Message& message) {
        SharedAnswer answer;
        std::memcpy(&answer, message.data(), sizeof(answer));
        answer_ = answer;
        if (answer.busy) ring_->set_spare(answer.busy < static_cast<unsigned>(usable_cpus()));
    }

    const RegionArray region_;
    const bool is_server_;
    std::unique_ptr<SharedRing> ring_;
    std::optional<Message> kept_;
    SharedAnswer answer_{};
};

}  // namespace kvdb
