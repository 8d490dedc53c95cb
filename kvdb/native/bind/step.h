// A step's plan as Python holds it.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <memory>

#include "../steps/step_observations.h"
#include "bind.h"

namespace kvdb {

using HeadsArray = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WordsArray = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PyReads = std::tuple<TableArray, CountsArray, std::optional<OwnedPlacement>>;
using PyTurn = std::tuple<ScoresArray, ScoresArray, bool>;
using PyCut = std::tuple<StepCut::Kind, double>;
using PySearch =
    std::tuple<nb::object, std::int64_t, std::int64_t, PyReads, std::optional<HeadsArray>,
               std::optional<WordsArray>, bool, std::optional<PyTurn>, std::optional<PyCut>>;

// A plan, and what its addresses belong to.
struct PyStep {
    StepPlan plan;
    std::vector<std::unique_ptr<OwnedPlacement>> placements;
    std::vector<nb::object> searchers;

    PyStep() = default;
    PyStep(PyStep&&) = default;
    PyStep(const PyStep&) = delete;  // the plan has the placements' addresses

    StepBlocks blocks_of(const PyReads& reads);
    std::vector<std::uint8_t> heads_of(const HeadsArray& heads, const char* name) const;
    StepTurn turn_of(const PyTurn& turn) const;
    void add(const PySearch& search);
};

// Tuples of the number of the search, the values, and which of them are known, empty for all.
nb::list py_observations(const std::vector<StepObservation>& observations);

}  // namespace kvdb
