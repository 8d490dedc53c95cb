#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace kvdb {
namespace {

struct Candidate {
    const char* name;
    Isa isa;
    bool (*supported)();
};

bool always() {
    return true;
}

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() {
    return has_avx512() && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vpopcntdq");
}
#endif

// Best first.
constexpr Candidate kCandidates[] = {
#if defined(__x86_64__)
    {"avx512_bf16", Isa::avx512_bf16, has_avx512_bf16},
    {"avx512", Isa::avx512, has_avx512},
    {"avx2", Isa::avx2, has_avx2},
#elif defined(__aarch64__)
    {"neon", Isa::neon, always},
#endif
    {"portable", Isa::portable, always},
};

const Candidate& find(std::string_view name, const char* where) {
    std::string possible;
    for (const Candidate& candidate : kCandidates) {
        if (!candidate.supported()) continue;
        if (name == candidate.name) return candidate;
        possible += std::string(possible.empty() ? "" : ", ") + candidate.name;
    }
    throw std::invalid_argument(
        std::string(where) + "'" + std::string(name) +
        "' is not an instruction set that this machine can run; use one of " + possible);
}

const Candidate& choose() {
    const char* forced = std::getenv("KVDB_ISA");
    if (forced && *forced) return find(forced, "KVDB_ISA: ");
    for (const Candidate& candidate : kCandidates) {
        if (candidate.supported()) return candidate;
    }
    return *std::rbegin(kCandidates);
}

std::atomic<const Candidate*>& chosen() {
    static std::atomic<const Candidate*> candidate{&choose()};
    return candidate;
}

}  // namespace

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Candidate& candidate : kCandidates) {
        if (candidate.supported()) names.emplace_back(candidate.name);
    }
    return names;
}

Isa current_isa() {
    return chosen().load(std::memory_order_relaxed)->isa;
}

std::string isa() {
    return chosen().load(std::memory_order_relaxed)->name;
}

void set_isa(std::string_view name) {
    chosen() = &find(name, "isa: ");
}

}  // namespace kvdb
