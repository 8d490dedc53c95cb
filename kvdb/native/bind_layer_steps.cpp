#include <nanobind/stl/pair.h>

#include "bind_step.h"
#include "layer_steps.h"

using namespace nb::literals;

namespace kvdb {
namespace {

using PyFacts = std::vector<std::pair<nb::object, std::int64_t>>;

// The names of attributes, made once.
struct Names {
    nb::object dtype = interned("dtype"), shape = interned("shape"), is_cpu = interned("is_cpu"),
               is_neg = interned("is_neg"), data_ptr = interned("data_ptr"),
               is_contiguous = interned("is_contiguous"), new_empty = interned("new_empty");

    static nb::object interned(const char* name) {
        return nb::steal(PyUnicode_InternFromString(name));
    }
};

// The steps of a layer, and what their addresses belong to.
struct PyLayerSteps {
    LayerSteps steps;
    const Names names;
    const nb::object array_type, array_dtype, empty, shape;
    nb::object tensor_type, tensor_dtype, options;
    std::vector<nb::object> owners;

    PyLayerSteps(const Geometry& geometry, int q_heads, float scale, const nb::object& like)
        : steps(geometry, q_heads, scale),
          array_type(nb::borrow(like.type())),
          array_dtype(like.attr("dtype")),
          empty(nb::module_::import_("numpy").attr("empty")),
          shape(nb::make_tuple(q_heads, 1, geometry.head_dim)) {}

    // Whether these are the options of the present course, which most often are the same object.
    bool follows(nb::handle asked) const {
        if (asked.is(options)) return true;
        const int equal = PyObject_RichCompareBool(asked.ptr(), options.ptr(), Py_EQ);
        if (equal < 0) nb::raise_python_error();
        return equal == 1;
    }

    // An array of the shape of queries, of the library that `like` is of.
    nb::object empty_like(nb::handle like) const {
        if (like.type().is(array_type)) return empty(shape, array_dtype);
        PyObject* const arguments[] = {like.ptr(), shape.ptr()};
        PyObject* made = PyObject_VectorcallMethod(names.new_empty.ptr(), arguments,
                                                   2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
        if (!made) nb::raise_python_error();
        return nb::steal(made);
    }
};

// A caller's array [heads, 1, head_dim], of numpy or torch, as long as this object lives. It is
// false where it is anything else.
class TokenArray {
  public:
    TokenArray(const PyLayerSteps& owner, nb::handle array, std::int64_t heads,
               int flags = PyBUF_STRIDED)
        : owner_(owner), array_(array), geometry_(owner.steps.geometry), heads_(heads) {
        if (array.type().is(owner.array_type)) {
            read_buffer(flags);
        } else if (owner.tensor_type.is_valid() && array.type().is(owner.tensor_type)) {
            read_tensor();
        }
    }
    TokenArray(const TokenArray&) = delete;
    TokenArray& operator=(const TokenArray&) = delete;
    ~TokenArray() {
        if (buffer_.obj) PyBuffer_Release(&buffer_);
    }

    explicit operator bool() const { return rows_.data; }
    const Rows& rows() const { return rows_; }

  private:
    bool has(const nb::object& name, const nb::object& value) const { return get(name).is(value); }
    nb::object get(const nb::object& name) const {
        return checked(PyObject_GetAttr(array_.ptr(), name.ptr()));
    }
    nb::object call(const nb::object& name) const {
        return checked(PyObject_CallMethodNoArgs(array_.ptr(), name.ptr()));
    }
    static nb::object checked(PyObject* object) {
        if (!object) PyErr_Clear();  // its caller hears of it where Python looks at the array
        return nb::steal(object);
    }

    void read_buffer(int flags) {
        if (!has(owner_.names.dtype, owner_.array_dtype)) return;
        if (PyObject_GetBuffer(array_.ptr(), &buffer_, flags) != 0) {
            PyErr_Clear();
            buffer_.obj = nullptr;
            return;
        }
        const auto size = static_cast<Py_ssize_t>(geometry_.element_bytes());
        if (buffer_.ndim == 3 && buffer_.itemsize == size && buffer_.shape[0] == heads_ &&
            buffer_.shape[1] == 1 && buffer_.shape[2] == geometry_.head_dim &&
            buffer_.strides[2] == size && buffer_.strides[0] % size == 0) {
            rows_ = {buffer_.buf, buffer_.strides[0] / size, geometry_.head_dim};
        }
    }

    void read_tensor() {
        const Names& names = owner_.names;
        const nb::object yes = nb::bool_(true), shape = get(names.shape);
        if (!has(names.dtype, owner_.tensor_dtype) || !has(names.is_cpu, yes) ||
            !call(names.is_contiguous).is(yes) ||
            (geometry_.dtype == Dtype::float32 && call(names.is_neg).is(yes)) ||
            !shape.is_valid() || !PyTuple_Check(shape.ptr()) ||
            PyTuple_GET_SIZE(shape.ptr()) != 3) {
            return;
        }
        const std::int64_t expected[] = {heads_, 1, geometry_.head_dim};
        for (int i = 0; i < 3; ++i) {
            if (PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i)) != expected[i]) return;
        }
        const nb::object address = call(names.data_ptr);
        if (address.is_valid()) {
            rows_ = {PyLong_AsVoidPtr(address.ptr()), geometry_.head_dim, geometry_.head_dim};
        }
    }

    const PyLayerSteps& owner_;
    const nb::handle array_;
    const Geometry& geometry_;
    const std::int64_t heads_;
    Py_buffer buffer_{};
    Rows rows_{};
};

nb::bytes bytes_of(const std::vector<std::byte>& bytes) {
    return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

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

// None where the step is refused.
nb::object py_step(PyLayerSteps& self, nb::handle q, nb::handle k, nb::handle v, nb::handle options,
                   nb::handle start) {
    LayerSteps& steps = self.steps;
    if (!steps.goes_on() || !self.follows(options)) return nb::none();
    if (!start.is_none() &&
        (!PyLong_CheckExact(start.ptr()) || PyLong_AsLongLong(start.ptr()) != steps.tokens())) {
        PyErr_Clear();  // of a number that is too large
        return nb::none();
    }
    const int kv_heads = steps.geometry.kv_heads;
    const TokenArray query(self, q, steps.q_heads), key(self, k, kv_heads),
        value(self, v, kv_heads);
    if (!query || !key || !value) return nb::none();
    nb::object out = self.empty_like(q);
    const TokenArray to(self, out, steps.q_heads, PyBUF_STRIDED | PyBUF_WRITABLE);
    if (!to || to.rows().head_stride != steps.geometry.head_dim) return nb::none();
    bool answered;
    {
        const ReleaseGil release;
        answered = steps.step(query.rows(), key.rows(), value.rows(), to.rows().data);
    }
    return answered ? out : nb::none();
}

nb::list py_samples(PyLayerSteps& self) {
    nb::list samples;
    for (const SampledQuery& sample : self.steps.take_samples()) {
        samples.append(nb::make_tuple(sample.step, bytes_of(sample.query)));
    }
    return samples;
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
        .def(
            "take_tensors",
            [](PyLayerSteps& self, const nb::object& type, const nb::object& dtype) {
                self.tensor_type = type;
                self.tensor_dtype = dtype;
            },
            "tensor"_a, "dtype"_a)
        .def("undo", [](PyLayerSteps& self) { self.steps.undo(); })
        .def("stop", [](PyLayerSteps& self) { self.steps.stop(); })
        .def("step", &py_step, "q"_a, "k"_a, "v"_a, "options"_a, "start"_a.none())
        .def(
            "sample_next",
            [](PyLayerSteps& self, std::int64_t in, std::int64_t every) {
                self.steps.sample_next(in, every);
            },
            "in_steps"_a, "every"_a)
        .def("take_totals", [](PyLayerSteps& self) { return self.steps.take_totals(); })
        .def("take_samples", &py_samples)
        .def("last_query",
             [](const PyLayerSteps& self) { return bytes_of(self.steps.last_query()); });
}

}  // namespace kvdb
