// What the bindings of both extension modules share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "geometry.h"
#include "isa.h"
#include "memory_nodes.h"
#include "paged_memory.h"
#include "processor.h"
#include "thread_pool.h"
#include "usable_cpus.h"

namespace nb = nanobind;

namespace kvdb {

[[noreturn]] inline void fail(const std::string& message) {
    throw std::invalid_argument(message);
}

// Lets other Python threads run as long as this object lives. If the interpreter ends meanwhile,
// taking the lock back would unwind this thread through C++ that holds Python objects, which ends
// the whole process with a signal; so the thread waits here until the process is gone.
class ReleaseGil {
  public:
    ReleaseGil() : thread_(PyEval_SaveThread()) {}
    ReleaseGil(const ReleaseGil&) = delete;
    ReleaseGil& operator=(const ReleaseGil&) = delete;
    ~ReleaseGil() {
        try {
            PyEval_RestoreThread(thread_);
        } catch (...) {  // the unwinding, which must not be caught for good but can be held up
            for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }

  private:
    PyThreadState* const thread_;
};

template <class Array>
std::string shape_of(const Array& array) {
    std::string text = "[";
    for (std::size_t i = 0; i < array.ndim(); ++i) {
        text += (i ? ", " : "") + std::to_string(array.shape(i));
    }
    return text + "]";
}

// Fails unless an array has the shape expected.
template <class Array>
void check_shape(const Array& array, std::initializer_list<std::int64_t> expected,
                 const char* name) {
    bool same = array.ndim() == expected.size();
    std::string text;
    std::size_t i = 0;
    for (const std::int64_t dim : expected) {
        same = same && static_cast<std::int64_t>(array.shape(i)) == dim;
        text += (i++ ? ", " : "") + std::to_string(dim);
    }
    if (!same) {
        fail(std::string(name) + " has shape " + shape_of(array) + "; expected [" + text + "]");
    }
}

// Memory that does not come is an OSError with the name of its file.
inline void translate_page_errors() {
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const PageError& error) {
            const nb::object values = nb::make_tuple(error.code, error.what(), error.file);
            PyErr_SetObject(PyExc_OSError, values.ptr());
        }
    });
}

inline void bind_dtype(nb::module_& m) {
    nb::enum_<Dtype>(m, "Dtype")
        .value("float32", Dtype::float32)
        .value("float16", Dtype::float16)
        .value("bfloat16", Dtype::bfloat16);
}

// What the machine is, as the system says, and what the pool did.
inline void bind_machine(nb::module_& m) {
    using namespace nb::literals;
    using Node = std::pair<int, std::vector<int>>;
    const auto pairs = [](const MemoryNodes& nodes) {
        std::vector<Node> all;
        for (const MemoryNode& node : nodes.all()) all.emplace_back(node.id, node.cpus);
        return all;
    };
    m.def("usable_cpus", &usable_cpus);
    m.def("cpu_quota", &cpu_quota, "root"_a = "");
    m.def(
        "memory_nodes", [pairs](const std::string& root) { return pairs(MemoryNodes::read(root)); },
        "root"_a = "");
    m.def(
        "set_memory_nodes",
        [](const std::vector<Node>& nodes) {
            std::vector<MemoryNode> all;
            for (const auto& [id, cpus] : nodes) {
                if (id < 0 || id >= 1024 || cpus.empty()) {
                    fail("node " + std::to_string(id) + " has " + std::to_string(cpus.size()) +
                         " processors; expected a number from 0 to 1023 and at least one");
                }
                all.push_back({id, cpus});
            }
            MemoryNodes::set(MemoryNodes(std::move(all)));
        },
        "nodes"_a);
    m.def(
        "interleave",
        [](std::uintptr_t address, std::size_t nbytes) {
            return MemoryNodes::current().interleave(reinterpret_cast<void*>(address), nbytes);
        },
        "address"_a, "nbytes"_a);
    m.def("pool_counters", [] {
        std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>> rows;
        for (const ThreadPool::Counters& slot : ThreadPool::instance().counters()) {
            rows.emplace_back(slot.jobs, slot.items, slot.woken, slot.caught);
        }
        return rows;
    });
}

// Settings of the whole process. A wrong KVDB_ISA or KVDB_THREADS fails here, not in a later call.
inline void bind_settings(nb::module_& m) {
    using namespace nb::literals;
    m.def("isa", &isa);
    m.def("isas", &isas);
    m.def("emulated_isas", &emulated_isas);
    m.def("set_isa", &set_isa, "name"_a);
    m.def("variants", &variants);
    const auto named = [](const KernelNames& kernels) {
        nb::dict used;
        for (const auto& [operation, isa] : kernels) used[operation.c_str()] = isa;
        return used;
    };
    m.def("kernels", [named] { return named(chosen_kernels()); });
    m.def("set_kernels", &set_kernels, "operation"_a, "isa"_a);
    m.def("processor_family", [] {
        const Family* family = family_of(this_processor());
        return std::string(family ? family->name : "");
    });
    m.def(
        "kernels_of",
        [named](const std::string& vendor, unsigned family, unsigned model, bool avx512_bf16) {
            const Family* row = family_of({vendor, family, model, avx512_bf16});
            return row ? std::pair(std::string(row->name), named(kernels_of(*row)))
                       : std::pair(std::string(), nb::dict());
        },
        "vendor"_a, "family"_a, "model"_a, "avx512_bf16"_a);
    m.def("threads", &ThreadPool::threads);
    m.def("set_threads", &ThreadPool::set_threads, "n"_a);
    m.def("spin_us", &ThreadPool::spin_us);
    m.def("set_spin_us", &ThreadPool::set_spin_us, "microseconds"_a);
    m.def("work_in_background", &work_in_background);
    bind_machine(m);
    isa();
    ThreadPool::threads();
}

}  // namespace kvdb
