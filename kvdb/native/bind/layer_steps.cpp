#include "layer_steps.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "thread_pool.h"

using namespace nb::literals;

namespace kvdb {
namespace {

constexpr std::int64_t kRecentMax = 1 << 12;  // queries, which bounds what memory is taken

using PyFacts = std::vector<std::pair<nb::object, std::int64_t>>;

template <class Taken>
Taken taken(const nb::object& array, const char* name) {
    Taken cast;
    if (!nb::try_cast(array, cast)) {
        throw nb::type_error((std::string(name) + " has another dtype or layout").c_str());
    }
    return cast;
}

nb::bytes bytes_of(const std::vector<std::byte>& bytes) {
    return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Of steps, which are counted on from there.
std::int64_t checked_count(std::int64_t count, const char* name) {
    constexpr std::int64_t most = std::int64_t{1} << 62;
    if (count < -most || count > most) fail(std::string(name) + " is no number of steps");
    return count;
}

// The blocks into which so many tokens will go hold none.
void check_empty(const std::int32_t* counts, std::int64_t tokens, int block_size) {
    for (; tokens > 0; tokens -= block_size, ++counts) {
        if (*counts != 0) fail("a block behind the run's last holds tokens already");
    }
}

void py_follow(PyLayerSteps& self, const nb::object& options, const nb::object& plan,
               const nb::object& table, const nb::object& counts, std::int64_t blocks,
               const std::optional<OwnedPlacement>& placement, std::int64_t tokens,
               std::int64_t steps, const PyFacts& facts) {
    const auto addresses = taken<TableArray>(table, "table");
    const auto filled =
        taken<nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig>>(counts, "counts");
    const auto size = static_cast<std::int64_t>(std::min(addresses.size(), filled.size()));
    const Geometry& geometry = self.steps.geometry;
    if (blocks < 1 || blocks > size) {
        fail("blocks is " + std::to_string(blocks) + "; expected 1 to " + std::to_string(size));
    }
    const std::int32_t held = filled.data()[blocks - 1];
    const std::int64_t room = geometry.block_size - held;
    if (steps < 0 || held < 0 || room < 0 || steps > room + (size - blocks) * geometry.block_size) {
        fail("the last block holds " + std::to_string(held) + " tokens, and it and the " +
             std::to_string(size - blocks) + " behind it have no room for " +
             std::to_string(steps));
    }
    if (tokens < 0 || tokens > blocks * geometry.block_size - room) {
        fail("the run of " + std::to_string(blocks) + " blocks cannot hold " +
             std::to_string(tokens) + " tokens");
    }
    check_empty(filled.data() + blocks, steps - room, geometry.block_size);
    StepCourse course{};
    if (!plan.is_none()) {
        course.plan = &nb::cast<const PyStep&>(plan).plan;
        if (course.plan->q_heads != self.steps.q_heads || course.plan->grows_from > blocks ||
            course.plan->geometry != geometry) {
            fail("the plan is of another run");
        }
        if (self.steps.window > 0) fail("what a window shows is read whole; expected no plan");
    }
    course.table = addresses.data();
    course.counts = filled.data();
    course.blocks = blocks;
    auto owned = placement ? std::make_unique<OwnedPlacement>(*placement) : nullptr;
    if (owned) course.placement = owned->of(geometry, blocks);
    course.tokens = tokens;
    course.steps = steps;
    self.owners = {plan, table, counts};
    for (const auto& [version, value] : facts) {
        course.facts.emplace_back(&nb::cast<const Version&>(version), value);
        self.owners.push_back(version);
    }
    self.options = options;
    self.placement = std::move(owned);
    self.steps.follow(std::move(course));
}

// A caller's arrays of one step, as long as this object lives. It is false where one is anything
// else. What v is makes no difference where tokens have no values of their own.
class StepArrays {
  public:
    StepArrays(const PyLayerSteps& owner, nb::handle q, nb::handle k, nb::handle v, nb::handle out)
        : geometry_(owner.steps.geometry),
          q_(owner.kinds, q, owner.steps.q_heads, geometry_.head_dim),
          k_(owner.kinds, k, geometry_.kv_heads, geometry_.head_dim),
          v_(owner.kinds, geometry_.own_values() ? v : nb::handle(Py_None), geometry_.kv_heads,
             geometry_.value_dim),
          out_(owner.kinds, out, owner.steps.q_heads, geometry_.value_dim, PyBUF_STRIDED) {}

    explicit operator bool() const {
        return q_ && k_ && (v_ || !geometry_.own_values()) && out_ &&
               out_.rows().head_stride == out_.rows().token_stride;
    }
    TokenStep of(LayerSteps& layer) const {
        return {&layer, q_.rows(), k_.rows(), v_.rows(), out_.rows().data};
    }

  private:
    const Geometry& geometry_;
    const TokenArray q_, k_, v_, out_;
};

// Whether a layer takes the next step, and for these options, at this position.
bool goes_on(const PyLayerSteps& layer, nb::handle options, nb::handle start) {
    if (!layer.steps.goes_on() || !layer.follows(options)) return false;
    const bool elsewhere =
        !start.is_none() &&
        (!PyLong_CheckExact(start.ptr()) || PyLong_AsLongLong(start.ptr()) != layer.steps.tokens());
    PyErr_Clear();  // of a number that is too large
    return !elsewhere;
}

// None where the step is refused.
nb::object py_step(PyLayerSteps& self, nb::handle q, nb::handle k, nb::handle v, nb::handle options,
                   nb::handle start) {
    if (!goes_on(self, options, start)) return nb::none();
    if (!self.kinds.takes(q)) return nb::none();
    const ThreadPool::Series series(self.steps.threads());
    nb::object out = self.kinds.empty_like(q, self.shape);
    const StepArrays arrays(self, q, k, v, out);
    if (!arrays) return nb::none();
    bool answered;
    {
        const ReleaseGil release;
        answered = take_steps({arrays.of(self.steps)}, 0);
    }
    return answered ? out : nb::none();
}

// One step of each layer, all or none. q, k, v, out: arrays whose elements are those of the layers.
bool py_steps(const std::vector<PyLayerSteps*>& layers, const nb::sequence& q,
              const nb::sequence& k, const nb::sequence& v, nb::handle options,
              const nb::object& starts, const nb::sequence& out, std::int64_t shared_tokens_min) {
    for (const nb::sequence* whole : {&q, &k, &v, &out}) {
        if (nb::len(*whole) != layers.size()) return false;
    }
    if (!starts.is_none() && nb::len(starts) != layers.size()) return false;
    int threads = 1;
    for (const PyLayerSteps* layer : layers) {
        if (layer) threads = std::max(threads, layer->steps.threads());
    }
    const ThreadPool::Series series(threads);
    std::vector<nb::object> owned;
    std::vector<std::unique_ptr<StepArrays>> arrays;
    std::vector<TokenStep> tokens;
    for (std::size_t i = 0; i < layers.size(); ++i) {
        PyLayerSteps* layer = layers[i];
        const auto earlier = layers.begin() + static_cast<std::ptrdiff_t>(i);
        if (!layer || std::find(layers.begin(), earlier, layer) != earlier) {
            fail("every layer has one step at most");
        }
        if (!layer->steps.like(layers[0]->steps)) fail("the layers are of several models");
        const nb::object start = starts.is_none() ? nb::none() : nb::object(starts[i]);
        if (!goes_on(*layer, options, start)) return false;
        const std::size_t first = owned.size();
        for (const nb::sequence* whole : {&q, &k, &v, &out}) owned.push_back((*whole)[i]);
        arrays.push_back(std::make_unique<StepArrays>(*layer, owned[first], owned[first + 1],
                                                      owned[first + 2], owned[first + 3]));
        if (!*arrays.back()) return false;
        tokens.push_back(arrays.back()->of(layer->steps));
    }
    const ReleaseGil release;
    return take_steps(tokens, shared_tokens_min);
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
        .def_ro("bound_max", &StepTotals::bound_max)
        .def_ro("search_ns", &StepTotals::search_ns)
        .def_ro("gather_ns", &StepTotals::gather_ns)
        .def_ro("tokens", &StepTotals::tokens);
    nb::class_<PyLayerSteps>(m, "LayerSteps")
        .def(
            "__init__",
            [](PyLayerSteps* self, const Geometry& geometry, int q_heads, float scale,
               const nb::object& like, std::int64_t window) {
                if (window < 0) fail("window is below 0");
                new (self) PyLayerSteps(geometry, q_heads, scale, like, window);
            },
            "geometry"_a, "q_heads"_a, "scale"_a, "like"_a, "window"_a = 0)
        .def(
            "set_sinks",
            [](PyLayerSteps& self, const std::optional<ScoresArray>& sinks) {
                const float* data = checked_sinks(sinks, self.steps.q_heads);
                self.steps.set_sinks({data, data + (data ? self.steps.q_heads : 0)});
            },
            "sinks"_a.none())
        .def("follow", &py_follow, "options"_a, "plan"_a.none(), "table"_a, "counts"_a, "blocks"_a,
             "placement"_a.none(), "tokens"_a, "steps"_a, "facts"_a)
        .def(
            "take_tensors",
            [](PyLayerSteps& self, const nb::object& type, const nb::object& dtype) {
                self.kinds.take_tensors(type, dtype);
            },
            "tensor"_a, "dtype"_a)
        .def("stop", [](PyLayerSteps& self) { self.steps.stop(); })
        .def("step", &py_step, "q"_a, "k"_a, "v"_a.none(), "options"_a, "start"_a.none())
        .def(
            "sample_next",
            [](PyLayerSteps& self, std::int64_t in, std::int64_t every) {
                self.steps.sample_next(checked_count(in, "in_steps"),
                                       checked_count(every, "every"));
            },
            "in_steps"_a, "every"_a)
        .def(
            "observe_next",
            [](PyLayerSteps& self, std::int64_t asked, std::int64_t first, std::int64_t every) {
                if (every < 1) fail("every is below 1");
                self.steps.observe_next(checked_count(asked, "asked"), first, every);
            },
            "asked"_a, "first"_a, "every"_a)
        .def(
            "keep_last",
            [](PyLayerSteps& self, std::int64_t most) {
                if (most < 0 || most > kRecentMax) {
                    fail("most is " + std::to_string(most) + "; expected 0 to " +
                         std::to_string(kRecentMax));
                }
                self.steps.keep_last(most);
            },
            "most"_a)
        .def("recent",
             [](const PyLayerSteps& self) {
                 const RecentSteps recent = self.steps.recent();
                 return nb::make_tuple(bytes_of(recent.queries), bytes_of(recent.answers));
             })
        .def_prop_ro("threads", [](const PyLayerSteps& self) { return self.steps.threads(); })
        .def_prop_ro("full", [](const PyLayerSteps& self) { return self.steps.full(); })
        .def_prop_ro(
            "halted",
            [](const PyLayerSteps& self) { return self.steps.left() == 0 || self.steps.full(); })
        .def_prop_ro("left", [](const PyLayerSteps& self) { return self.steps.left(); })
        .def_prop_rw(
            "last_ns", [](const PyLayerSteps& self) { return self.steps.last_ns; },
            [](PyLayerSteps& self, std::int64_t ns) { self.steps.last_ns = ns; })
        .def("take_observations",
             [](PyLayerSteps& self) { return py_observations(self.steps.take_observations()); })
        .def("take_totals", [](PyLayerSteps& self) { return self.steps.take_totals(); })
        .def("take_samples", &py_samples)
        .def("last_query",
             [](const PyLayerSteps& self) { return bytes_of(self.steps.last_query()); });
    m.def("take_steps", &py_steps, "layers"_a, "q"_a, "k"_a, "v"_a, "options"_a, "starts"_a.none(),
          "out"_a, "shared_tokens_min"_a);
}

}  // namespace kvdb
