// The requests that come through a ring again and again, known by their message.
#include <cstring>
#include <string>
#include <unordered_map>

#include "../attend/attend.h"
#include "shared_ring.h"

using namespace nb::literals;

namespace kvdb {
namespace {

// A server's end of a ring. A request like one that was learned before, of another number, start
// and time, is answered by what was learned with it; any other is handed over as it came.
class PySharedCalls {
  public:
    PySharedCalls(PySharedRing& ring, std::uint64_t generation)
        : ring_(ring), generation_(generation) {}

    // What was learned with the next request, or its bytes, or None where none came.
    nb::object receive(double seconds) {
        PySharedRing::Message message;
        if (!ring_.next(message, seconds)) return nb::none();
        std::memcpy(&request_, message.data(), sizeof(request_));
        answered_ = false;
        const auto* known = find();
        return known ? known->payload : nb::object(nb::bytes(message.data(), sizeof(request_)));
    }

    // From now on, requests like the last, of this message, are answered by this.
    void learn(const nb::bytes& message, nb::object payload) {
        if (message.size() > kMessageMax) return;
        known_[std::string(message.c_str(), message.size())] = {request_, std::move(payload)};
    }

    void forget() { known_.clear(); }

    // Answers the last request, whose reply has so many bytes.
    void answer(std::uint64_t reply_bytes, double queue_us, double engine_us, double kernel_us,
                std::uint32_t busy) {
        SharedAnswer answer{};
        answer.generation = generation_;
        answer.number = request_.number;
        answer.reply_bytes = reply_bytes;
        answer.queue_us = static_cast<float>(queue_us);
        answer.engine_us = static_cast<float>(engine_us);
        answer.kernel_us = static_cast<float>(kernel_us);
        answer.busy = busy;
        ring_.send(&answer);
        answered_ = true;
    }

    bool answered() const { return answered_; }

    nb::object start() const {
        return request_.flags & kHasStart ? nb::object(nb::int_(request_.start)) : nb::none();
    }
    nb::bytes last() const { return nb::bytes(&request_, sizeof(request_)); }

  private:
    static constexpr std::uint64_t kMessageMax = 1024;

    struct Known {
        SharedRequest request;
        nb::object payload;
    };

    // The message of the request, copied once; empty where it lies nowhere.
    std::string message() const {
        const std::byte* at = ring_.at(request_.message, request_.message_bytes);
        return at ? std::string(reinterpret_cast<const char*>(at), request_.message_bytes)
                  : std::string();
    }

    const Known* find() const {
        if (known_.empty() || request_.message_bytes > kMessageMax) return nullptr;
        const auto found = known_.find(message());
        if (found == known_.end()) return nullptr;
        const SharedRequest& like = found->second.request;
        const bool same = request_.generation == generation_ && request_.kind == like.kind &&
                          request_.tokens == like.tokens && request_.q == like.q &&
                          request_.k == like.k && request_.v == like.v &&
                          request_.reply == like.reply && request_.reply_room == like.reply_room;
        return same ? &found->second : nullptr;
    }

    PySharedRing& ring_;  // which Python keeps as long as this object
    const std::uint64_t generation_;
    SharedRequest request_{};
    bool answered_ = false;
    std::unordered_map<std::string, Known> known_;
};

}  // namespace

void bind_shared_calls(nb::module_& m) {
    m.def("leave_processor", &leave_processor);
    nb::class_<PySharedCalls>(m, "SharedCalls")
        .def(nb::init<PySharedRing&, std::uint64_t>(), "ring"_a, "generation"_a,
             nb::keep_alive<1, 2>())
        .def("receive", &PySharedCalls::receive, "seconds"_a)
        .def("learn", &PySharedCalls::learn, "message"_a, "payload"_a)
        .def("forget", &PySharedCalls::forget)
        .def("answer", &PySharedCalls::answer, "reply_nbytes"_a, "queue_us"_a = 0.0,
             "engine_us"_a = 0.0, "kernel_us"_a = 0.0, "busy"_a = 0)
        .def_prop_ro("answered", &PySharedCalls::answered)
        .def_prop_ro("start", &PySharedCalls::start)
        .def_prop_ro("last", &PySharedCalls::last);
}

}  // namespace kvdb
