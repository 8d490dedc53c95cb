#include "shared_ring.h"

using namespace nb::literals;

namespace kvdb {

void bind_shared_ring(nb::module_& m) {
    nb::class_<PySharedRing>(m, "SharedRing")
        .def(nb::init<const RegionArray&, bool>(), "region"_a, "is_server"_a)
        .def("send", nb::overload_cast<const nb::bytes&>(&PySharedRing::send), "message"_a)
        .def("receive", &PySharedRing::receive, "seconds"_a)
        .def("stop", &PySharedRing::stop)
        .def_prop_ro("times_us", [](const PySharedRing& self) {
            const auto [queue, engine, kernel] = self.times_us();
            return nb::make_tuple(queue, engine, kernel);
        });
    m.attr("RING_BYTES") = SharedRing::kBytes;
    m.attr("RING_SLOTS") = SharedRing::kSlots;
}

}  // namespace kvdb
