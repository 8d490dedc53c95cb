// The steps of a layer as Python holds them, and the arrays that callers hand in.
#pragma once

#include "bind_step.h"
#include "layer_steps.h"

namespace kvdb {

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
    std::unique_ptr<OwnedPlacement> placement;

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

    // Whether it is an array of a library that callers' arrays are of.
    bool takes(nb::handle array) const {
        return array.type().is(array_type) ||
               (tensor_type.is_valid() && array.type().is(tensor_type));
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

}  // namespace kvdb
