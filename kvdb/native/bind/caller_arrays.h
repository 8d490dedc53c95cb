// The arrays that callers hand in, of numpy or torch.
#pragma once

#include "bind.h"

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

// What callers' arrays are of: numpy, and torch once somebody has it.
struct CallerArrays {
    const Names names;
    const Dtype dtype;
    const nb::object array_type, array_dtype, empty;
    nb::object tensor_type, tensor_dtype;

    // like: an array of numpy of the dtype.
    CallerArrays(Dtype dtype, const nb::object& like)
        : dtype(dtype),
          array_type(nb::borrow(like.type())),
          array_dtype(like.attr("dtype")),
          empty(nb::module_::import_("numpy").attr("empty")) {}

    std::int64_t element_bytes() const { return dtype == Dtype::float32 ? 4 : 2; }

    // Whether it is an array of a library that callers' arrays are of.
    bool takes(nb::handle array) const {
        return array.type().is(array_type) ||
               (tensor_type.is_valid() && array.type().is(tensor_type));
    }

    void take_tensors(const nb::object& type, const nb::object& type_dtype) {
        tensor_type = type;
        tensor_dtype = type_dtype;
    }

    // An array of this shape, a tuple, of the library that `like` is of.
    nb::object empty_like(nb::handle like, const nb::object& shape) const {
        if (like.type().is(array_type)) return empty(shape, array_dtype);
        PyObject* const arguments[] = {like.ptr(), shape.ptr()};
        PyObject* made = PyObject_VectorcallMethod(names.new_empty.ptr(), arguments,
                                                   2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
        if (!made) nb::raise_python_error();
        return nb::steal(made);
    }
};

// A caller's array [heads, 1, dims], of numpy or torch, as long as this object lives. It is false
// where it is anything else.
class TokenArray {
  public:
    TokenArray(const CallerArrays& kinds, nb::handle array, std::int64_t heads, std::int64_t dims,
               int flags = PyBUF_STRIDED_RO)
        : kinds_(kinds), array_(array), heads_(heads), dims_(dims) {
        if (array.type().is(kinds.array_type)) {
            read_buffer(flags);
        } else if (kinds.tensor_type.is_valid() && array.type().is(kinds.tensor_type)) {
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
        if (!has(kinds_.names.dtype, kinds_.array_dtype)) return;
        if (PyObject_GetBuffer(array_.ptr(), &buffer_, flags) != 0) {
            PyErr_Clear();
            buffer_.obj = nullptr;
            return;
        }
        const auto size = static_cast<Py_ssize_t>(kinds_.element_bytes());
        if (buffer_.ndim == 3 && buffer_.itemsize == size && buffer_.shape[0] == heads_ &&
            buffer_.shape[1] == 1 && buffer_.shape[2] == dims_ && buffer_.strides[2] == size &&
            buffer_.strides[0] % size == 0) {
            rows_ = {buffer_.buf, buffer_.strides[0] / size, dims_};
        }
    }

    void read_tensor() {
        const Names& names = kinds_.names;
        const nb::object yes = nb::bool_(true), shape = get(names.shape);
        if (!has(names.dtype, kinds_.tensor_dtype) || !has(names.is_cpu, yes) ||
            !call(names.is_contiguous).is(yes) ||
            (kinds_.dtype == Dtype::float32 && call(names.is_neg).is(yes)) || !shape.is_valid() ||
            !PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) != 3) {
            return;
        }
        const std::int64_t expected[] = {heads_, 1, dims_};
        for (int i = 0; i < 3; ++i) {
            if (PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i)) != expected[i]) return;
        }
        const nb::object address = call(names.data_ptr);
        if (address.is_valid()) {
            rows_ = {PyLong_AsVoidPtr(address.ptr()), dims_, dims_};
        }
    }

    const CallerArrays& kinds_;
    const nb::handle array_;
    const std::int64_t heads_, dims_;
    Py_buffer buffer_{};
    Rows rows_{};
};

}  // namespace kvdb
