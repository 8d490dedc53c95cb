// One token's attend through shared memory, from the caller's arrays to the answer.
#include <nanobind/stl/optional.h>

#include <cstring>
#include <limits>
#include <string>

#include "caller_arrays.h"
#include "shared_ring.h"

using namespace nb::literals;

namespace kvdb {
namespace {

constexpr std::uint64_t aligned(std::uint64_t offset) {
    return (offset + kAlignment - 1) / kAlignment * kAlignment;
}

// The attends of one token, all with the same message: the same session, layer and options.
class PySharedStep {
  public:
    PySharedStep(int q_heads, int kv_heads, int head_dim, Dtype dtype, const nb::object& like,
                 const nb::bytes& message, std::uint64_t arena, std::uint64_t region_bytes,
                 std::optional<int> value_dim, bool values_in_keys)
        : geometry_(checked_geometry(dtype, kv_heads, head_dim, 1, value_dim, values_in_keys)),
          kinds_(dtype, like),
          shape_(nb::make_tuple(q_heads, 1, geometry_.value_dim)),
          q_heads_(q_heads),
          message_(message.c_str(), message.size()) {
        record_.kind = kAttend;
        record_.tokens = 1;
        record_.message = arena;
        record_.message_bytes = message_.size();
        record_.q = aligned(arena + message_.size());
        record_.k = aligned(record_.q + bytes_of(q_heads, geometry_.head_dim));
        record_.v = aligned(record_.k + bytes_of(kv_heads, geometry_.head_dim));
        record_.reply = aligned(
            record_.v + (geometry_.own_values() ? bytes_of(kv_heads, geometry_.value_dim) : 0));
        const std::uint64_t room =
            std::max<std::uint64_t>(bytes_of(q_heads, geometry_.value_dim), kErrorRoom);
        if (record_.reply + room > region_bytes) fail("a region has no room for these arrays");
        record_.reply_room = region_bytes - record_.reply;
    }

    void take_tensors(const nb::object& type, const nb::object& dtype) {
        kinds_.take_tensors(type, dtype);
    }

    // The answer; None for arrays of another form, and then nothing was sent. Otherwise the
    // request, whose answer is an error or did not come yet, and has still to be received.
    nb::object attend(PySharedRing& ring, std::uint64_t generation, std::uint64_t number,
                      nb::handle q, nb::handle k, nb::handle v, nb::handle start, double seconds,
                      double wait) {
        if (!kinds_.takes(q) || !put_start(start)) return nb::none();
        {
            const int heads = geometry_.kv_heads, dims = geometry_.head_dim;
            const bool own_values = geometry_.own_values();
            const TokenArray queries(kinds_, q, q_heads_, dims), keys(kinds_, k, heads, dims),
                values(kinds_, own_values ? v : nb::handle(Py_None), heads, geometry_.value_dim);
            if (!queries || !keys || (own_values && !values)) return nb::none();
            put(ring, record_.q, queries, q_heads_, dims);
            put(ring, record_.k, keys, heads, dims);
            if (own_values) put(ring, record_.v, values, heads, geometry_.value_dim);
        }
        std::memcpy(place(ring, record_.message, message_.size()), message_.data(),
                    message_.size());
        record_.generation = generation;
        record_.number = number;
        record_.seconds = seconds;
        if (!ring.send(&record_)) fail("as many requests are under way as a ring has slots");
        nb::object out = kinds_.empty_like(q, shape_);
        return answered(ring, out, wait) ? out : nb::object(nb::bytes(&record_, sizeof(record_)));
    }

  private:
    std::uint64_t bytes_of(int heads, int dims) const {
        return static_cast<std::uint64_t>(heads) * static_cast<std::uint64_t>(dims) *
               geometry_.element_bytes();
    }

    bool put_start(nb::handle start) {
        record_.flags = start.is_none() ? 0 : kHasStart;
        record_.start = 0;
        if (start.is_none()) return true;
        if (!PyLong_CheckExact(start.ptr())) return false;
        record_.start = PyLong_AsLongLong(start.ptr());
        const bool fits = !PyErr_Occurred();
        PyErr_Clear();
        return fits;
    }

    static std::byte* place(const PySharedRing& ring, std::uint64_t offset, std::uint64_t nbytes) {
        std::byte* at = ring.at(offset, nbytes);
        if (!at) fail("a region is smaller than this step expects");
        return at;
    }

    void put(const PySharedRing& ring, std::uint64_t offset, const TokenArray& array, int heads,
             int dims) const {
        const Rows& rows = array.rows();
        const auto row = static_cast<std::size_t>(bytes_of(1, dims));
        std::byte* to = place(ring, offset, bytes_of(heads, dims));
        const auto* from = static_cast<const std::byte*>(rows.data);
        const std::int64_t stride = rows.head_stride * kinds_.element_bytes();
        if (stride == static_cast<std::int64_t>(row)) {
            std::memcpy(to, from, row * static_cast<std::size_t>(heads));
            return;
        }
        for (int head = 0; head < heads; ++head, to += row, from += stride) {
            std::memcpy(to, from, row);
        }
    }

    // Waits for the answer and copies it; false where it is anything else, or did not come.
    bool answered(PySharedRing& ring, const nb::object& out, double wait) const {
        PySharedRing::Message message;
        if (!ring.next(message, wait)) return false;
        SharedAnswer answer;
        std::memcpy(&answer, message.data(), sizeof(answer));
        const std::uint64_t nbytes = bytes_of(q_heads_, geometry_.value_dim);
        const bool good = answer.generation == record_.generation &&
                          answer.number == record_.number && answer.error[0] == 0 &&
                          answer.reply_bytes == nbytes;
        const TokenArray to(kinds_, out, q_heads_, geometry_.value_dim, PyBUF_STRIDED);
        if (!good || !to || to.rows().head_stride != geometry_.value_dim) {
            ring.keep(message);
            return false;
        }
        std::memcpy(to.rows().data, place(ring, record_.reply, nbytes), nbytes);
        return true;
    }

    const Geometry geometry_;
    CallerArrays kinds_;
    const nb::object shape_;
    const int q_heads_;
    const std::string message_;
    SharedRequest record_{};
};

}  // namespace

void bind_shared_step(nb::module_& m) {
    nb::class_<PySharedStep>(m, "SharedStep")
        .def(nb::init<int, int, int, Dtype, const nb::object&, const nb::bytes&, std::uint64_t,
                      std::uint64_t, std::optional<int>, bool>(),
             "q_heads"_a, "kv_heads"_a, "head_dim"_a, "dtype"_a, "like"_a, "message"_a, "arena"_a,
             "region_bytes"_a, "value_dim"_a = nb::none(), "values_in_keys"_a = false)
        .def("take_tensors", &PySharedStep::take_tensors, "tensor"_a, "dtype"_a)
        .def("attend", &PySharedStep::attend, "ring"_a, "generation"_a, "number"_a, "q"_a.none(),
             "k"_a.none(), "v"_a.none(), "start"_a.none(), "seconds"_a, "wait"_a);
}

}  // namespace kvdb
