#include <array>
#include <cmath>
#include <memory>

#include "bind.h"
#include "shared_ring.h"

using namespace nb::literals;

namespace kvdb {
namespace {

using RegionArray = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr double kSecondsMax = 3600.0;

// A ring, and the memory that it lies in, which it keeps.
class PySharedRing {
  public:
    PySharedRing(const RegionArray& region, bool is_server) : region_(region) {
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
        if (!(seconds >= 0 && seconds <= kSecondsMax)) fail("expected 0 to 3600 seconds");
        std::array<std::byte, SharedRing::kRequestBytes> message;
        SharedRing::Received received;
        {
            const ReleaseGil release;
            const auto wait = std::chrono::nanoseconds(std::llround(seconds * 1e9));
            received = ring_->receive(message.data(), wait);
        }
        if (received == SharedRing::Received::nothing) return nb::none();
        if (received == SharedRing::Received::broken) {
            fail("the other end of a ring claims to have sent more messages than it has slots");
        }
        return nb::bytes(message.data(), ring_->received_bytes());
    }

    void stop() { ring_->stop(); }

  private:
    const RegionArray region_;
    std::unique_ptr<SharedRing> ring_;
};

}  // namespace

void bind_shared_ring(nb::module_& m) {
    nb::class_<PySharedRing>(m, "SharedRing")
        .def(nb::init<const RegionArray&, bool>(), "region"_a, "is_server"_a)
        .def("send", &PySharedRing::send, "message"_a)
        .def("receive", &PySharedRing::receive, "seconds"_a)
        .def("stop", &PySharedRing::stop);
    m.attr("RING_BYTES") = SharedRing::kBytes;
    m.attr("RING_SLOTS") = SharedRing::kSlots;
}

}  // namespace kvdb
