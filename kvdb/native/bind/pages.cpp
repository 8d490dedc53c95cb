#include <cerrno>
#include <limits>
#include <memory>

#include "../pages/page_pool.h"
#include "bind.h"

using namespace nb::literals;

namespace kvdb {
namespace {

using SumsArray = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using UnitsArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

void check_extent(std::uint64_t begin, std::int64_t nbytes, std::int64_t unit_nbytes,
                  std::int64_t at, std::int64_t sum_nbytes, std::int64_t block_nbytes,
                  const SumsArray& sums) {
    constexpr std::int64_t kPage = 4096;
    if (begin % kPage || nbytes < 1 || unit_nbytes < 1 || unit_nbytes % kPage ||
        nbytes % unit_nbytes) {
        fail(std::to_string(nbytes) + " bytes from " + std::to_string(begin) + " on in units of " +
             std::to_string(unit_nbytes) + "; expected whole pages in whole units");
    }
    if (at < 0 || at > std::numeric_limits<std::int64_t>::max() - nbytes) {
        fail("at is " + std::to_string(at) + "; expected where " + std::to_string(nbytes) +
             " bytes of a file begin");
    }
    const auto count = static_cast<std::int64_t>(sums.shape(0));
    const bool each = sum_nbytes == unit_nbytes && count == nbytes / unit_nbytes;
    const bool one = unit_nbytes == nbytes && sum_nbytes > 0 && count <= nbytes / sum_nbytes;
    if ((!each && !one) || block_nbytes < 1) {
        fail(std::to_string(count) + " sums of " + std::to_string(sum_nbytes) +
             " bytes; expected one for each unit, or a single unit that holds them");
    }
}

nb::object array_of(const std::vector<std::uint64_t>& values) {
    using Array = nb::ndarray<nb::numpy, const std::uint64_t>;
    return nb::cast(Array(values.data(), {values.size()}), nb::rv_policy::reference);
}

// The number and the message of an error of Python's, which may have no number.
PageError page_error(nb::python_error& error) {
    const nb::object number = nb::getattr(error.value(), "errno", nb::none());
    int code = EIO;
    nb::try_cast(number, code);
    const nb::object text = nb::getattr(error.value(), "strerror", nb::none());
    return {code, nb::str(text.is_none() ? error.value() : nb::handle(text)).c_str(), ""};
}

// Calls Python, from whatever thread brings pages in.
ReadPages read_by(nb::object call) {
    if (call.is_none()) return {};
    return [call = std::make_shared<nb::object>(std::move(call))](const auto& offsets,
                                                                  const auto& addresses) {
        const nb::gil_scoped_acquire acquire;
        try {
            (*call)(array_of(offsets), array_of(addresses));
        } catch (nb::python_error& error) {
            throw page_error(error);
        }
    };
}

}  // namespace

void bind_pages(nb::module_& m) {
    nb::class_<PagePool>(m, "PagePool")
        .def(nb::init<>())
        .def("set_limit", &PagePool::set_limit, "nbytes"_a, Unlocked())
        .def("shrink", &PagePool::shrink, "nbytes"_a, Unlocked())
        .def_prop_ro("nbytes", &PagePool::nbytes);
    nb::class_<LayerPages>(m, "LayerPages")
        .def(
            "__init__",
            [](LayerPages* self, PagePool& pool, std::uint64_t begin, std::int64_t nbytes,
               std::int64_t unit_nbytes, const std::string& file, std::int64_t file_nbytes,
               std::int64_t at, int layer, std::int64_t block_nbytes, std::int64_t sum_nbytes,
               const SumsArray& sums, nb::object read) {
                check_extent(begin, nbytes, unit_nbytes, at, sum_nbytes, block_nbytes, sums);
                new (self) LayerPages(pool, begin, nbytes, unit_nbytes,
                                      {file,
                                       file_nbytes,
                                       at,
                                       layer,
                                       block_nbytes,
                                       sum_nbytes,
                                       {sums.data(), sums.data() + sums.shape(0)},
                                       read_by(std::move(read))});
            },
            "pool"_a, "begin"_a, "nbytes"_a, "unit_nbytes"_a, "file"_a, "file_nbytes"_a, "at"_a,
            "layer"_a, "block_nbytes"_a, "sum_nbytes"_a, "sums"_a, "read"_a = nb::none(),
            nb::keep_alive<1, 2>())
        .def(
            "prefer",
            [](LayerPages& self, const UnitsArray& units) {
                const std::vector<std::int32_t> listed(units.data(), units.data() + units.size());
                for (const std::int32_t unit : listed) {
                    if (unit < 0 || unit >= self.units()) {
                        fail("unit " + std::to_string(unit) + " is none of the layer's " +
                             std::to_string(self.units()));
                    }
                }
                self.prefer(listed);
            },
            "units"_a)
        .def("pin", &LayerPages::pin)
        .def("unpin", &LayerPages::unpin)
        .def("take_all", &LayerPages::take_all, Unlocked())
        .def("read", &LayerPages::read, Unlocked())
        .def("give_up", &LayerPages::give_up, Unlocked())
        .def("discard", &LayerPages::discard, "preferred_too"_a = true, Unlocked())
        .def("leave", &LayerPages::leave, Unlocked())
        .def_prop_ro("full", &LayerPages::full)
        .def_prop_ro("nbytes", &LayerPages::nbytes)
        .def_prop_ro("missing_nbytes", &LayerPages::missing_nbytes)
        .def_prop_ro("preferred_nbytes", &LayerPages::preferred_nbytes)
        .def_prop_ro("waits", [](const LayerPages& self) {
            const PageWaits waits = self.waits();
            return nb::make_tuple(waits.pages, waits.batches, waits.seconds);
        });
}

}  // namespace kvdb
