#include <nanobind/stl/pair.h>

#include "bind_step.h"
#include "layer_steps.h"

using namespace nb::literals;

namespace kvdb {
namespace {

using PyFacts = std::vector<std::pair<nb::object, std::int64_t>>;

// The memory of a numpy array, which has no lock and no reference beyond the call.
class ArrayView {
  public:
    explicit ArrayView(nb::handle array, int flags = PyBUF_STRIDED) {
        if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) {
            PyErr_Clear();
            view_.obj = nullptr;
        }
    }
    ArrayView(const ArrayView&) = delete;
    ArrayView& operator=(const ArrayView&) = delete;
    ~ArrayView() {
        if (view_.obj) PyBuffer_Release(&view_);
    }

    // Whether it is [heads, 1, head_dim], the last dimension contiguous.
    bool is_token(std::int64_t heads, const Geometry& geometry) const {
        const auto size = static_cast<Py_ssize_t>(geometry.element_bytes());
        return view_.obj && view_.ndim == 3 && view_.itemsize == size && view_.shape[0] == heads &&
               view_.shape[1] == 1 && view_.shape[2] == geometry.head_dim &&
               view_.strides[2] == size && view_.strides[0] % size == 0;
    }
    Rows rows() const { return {view_.buf, view_.strides[0] / view_.itemsize, view_.shape[2]}; }

  private:
    Py_buffer view_{};
};

// The steps of a layer, and what their addresses belong to.
struct PyLayerSteps {
    LayerSteps steps;
    nb::object array_type, dtype, options;
    std::vector<nb::object> owners;

    PyLayerSteps(const Geometry& geometry, int q_heads, float scale, const nb::object& like)
        : steps(geometry, q_heads, scale),
          array_type(nb::borrow(like.type())),
          dtype(like.attr("dtype")) {}

    // Whether an array is of the type and dtype that steps take.
    bool takes(nb::handle array) const {
        return array.type().is(array_type) && nb::getattr(array, "dtype").is(dtype);
    }
};

void py_follow(PyLayerSteps& self, const nb::object& options, const nb::object& plan,
               const nb::object& table, const nb::object& counts, std::int64_t blocks,
               std::int64_t tokens, std::int64_t steps, const PyFacts& facts) {
    const auto addresses = nb::cast<TableArray>(table);
    const auto filled = nb::cast<nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig>>(counts);
    const auto size = static_cast<std::int64_t>(std::min(addresses.size(), filled.size()));
    const Geometry& geometry = self.steps.geometry;
    if (blocks < 1 || blocks > size) {
        fail("blocks is " + std::to_string(blocks) + "; expected 1 to " + std::to_string(size));
    }
    if (steps < 0 || filled.data()[blocks - 1] + steps > geometry.block_size) {
        fail("the last block holds " + std::to_string(filled.data()[blocks - 1]) +
             " tokens and has no room for " + std::to_string(steps));
    }
    StepCourse course{};
    if (!plan.is_none()) {
        course.plan = &nb::cast<const PyStep&>(plan).plan;
        if (course.plan->q_heads != self.steps.q_heads || course.plan->grows_from > blocks) {
            fail("the plan is of another run");
        }
    }
    course.table = addresses.data();
    course.counts = filled.data();
    course.blocks = blocks;
    course.tokens = tokens;
    course.steps = steps;
    self.owners = {plan, table, counts};
    for (const auto& [version, value] : facts) {
        course.facts.emplace_back(&nb::cast<const Version&>(version), value);
        self.owners.push_back(version);
    }
    self.options = options;
    self.steps.follow(std::move(course));
}

// None where the step is refused, else whether its query is to be kept.
nb::object py_step(PyLayerSteps& self, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                   nb::handle options, nb::handle start) {
    LayerSteps& steps = self.steps;
    const Geometry& geometry = steps.geometry;
    if (!options.is(self.options) || !steps.goes_on()) return nb::none();
    if (!self.takes(q) || !self.takes(k) || !self.takes(v)) return nb::none();
    if (!start.is_none() &&
        (!PyLong_CheckExact(start.ptr()) || PyLong_AsLongLong(start.ptr()) != steps.tokens())) {
        PyErr_Clear();  // of a number that is too large
        return nb::none();
    }
    const ArrayView query(q), key(k), value(v), to(out, PyBUF_STRIDED | PyBUF_WRITABLE);
    if (!query.is_token(steps.q_heads, geometry) || !key.is_token(geometry.kv_heads, geometry) ||
        !value.is_token(geometry.kv_heads, geometry)) {
        return nb::none();
    }
    if (!to.is_token(steps.q_heads, geometry) || to.rows().head_stride != geometry.head_dim) {
        fail("out is not [q_heads, 1, head_dim], contiguous");
    }
    LayerSteps::Outcome outcome;
    {
        const ReleaseGil release;
        outcome = steps.step(query.rows(), key.rows(), value.rows(), to.rows().data);
    }
    if (outcome == LayerSteps::Outcome::refused) return nb::none();
    return nb::bool_(outcome == LayerSteps::Outcome::sampled);
}

}  // namespace

void bind_layer_steps(nb::module_& m) {
    nb::class_<Version>(m, "Version")
        .def(nb::init<>())
        .def_prop_ro("value", &Version::value)
        .def("advance", &Version::advance);
    nb::class_<StepTotals>(m, "StepTotals")
        .def_ro("steps", &StepTotals::steps)
        .def_ro("scanned", &StepTotals::scanned)
        .def_ro("retrieved", &StepTotals::retrieved)
        .def_ro("nbytes", &StepTotals::nbytes)
        .def_ro("ns", &StepTotals::ns)
        .def_ro("missed", &StepTotals::missed)
        .def_ro("bound", &StepTotals::bound)
        .def_ro("bound_max", &StepTotals::bound_max);
    nb::class_<PyLayerSteps>(m, "LayerSteps")
        .def(nb::init<const Geometry&, int, float, const nb::object&>(), "geometry"_a, "q_heads"_a,
             "scale"_a, "like"_a)
        .def("follow", &py_follow, "options"_a, "plan"_a.none(), "table"_a, "counts"_a, "blocks"_a,
             "tokens"_a, "steps"_a, "facts"_a)
        .def("stop", [](PyLayerSteps& self) { self.steps.stop(); })
        .def("step", &py_step, "q"_a, "k"_a, "v"_a, "out"_a, "options"_a, "start"_a.none())
        .def(
            "sample_next",
            [](PyLayerSteps& self, std::int64_t in, std::int64_t every) {
                self.steps.sample_next(in, every);
            },
            "in_steps"_a, "every"_a)
        .def("take_totals", [](PyLayerSteps& self) { return self.steps.take_totals(); })
        .def("last_query", [](const PyLayerSteps& self) {
            const std::vector<std::byte>& last = self.steps.last_query();
            return nb::bytes(reinterpret_cast<const char*>(last.data()), last.size());
        });
}

}  // namespace kvdb
