// The steps of a layer as Python holds them.
#pragma once

#include "../steps/layer_steps.h"
#include "caller_arrays.h"
#include "step.h"

namespace kvdb {

// The steps of a layer, and what their addresses belong to.
struct PyLayerSteps {
    LayerSteps steps;
    CallerArrays kinds;
    const nb::object shape;
    nb::object options;
    std::vector<nb::object> owners;
    std::unique_ptr<OwnedPlacement> placement;

    PyLayerSteps(const Geometry& geometry, int q_heads, float scale, const nb::object& like,
                 std::int64_t window)
        : steps(geometry, q_heads, scale, window),
          kinds(geometry.dtype, like),
          shape(nb::make_tuple(q_heads, 1, geometry.value_dim)) {}

    // Whether these are the options of the present course, which most often are the same object.
    bool follows(nb::handle asked) const {
        if (asked.is(options)) return true;
        const int equal = PyObject_RichCompareBool(asked.ptr(), options.ptr(), Py_EQ);
        if (equal < 0) nb::raise_python_error();
        return equal == 1;
    }
};

}  // namespace kvdb
