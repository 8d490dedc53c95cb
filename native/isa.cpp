#include "isa.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "amx.h"
#include "processor.h"

namespace kvdb {
namespace {

struct Candidate {
    const char* name;
    Isa isa;
    bool (*supported)();
    bool emulated = false;
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
bool has_amx() {
    return has_avx512_bf16() && amx_permitted();
}
#endif

// Best first.
constexpr Candidate kCandidates[] = {
#if defined(__x86_64__)
#if KVDB_WITH_AVX512_BF16
    {"amx", Isa::amx, has_amx},
    {"avx512_bf16", Isa::avx512_bf16, has_avx512_bf16},
#endif
#if KVDB_WITH_AVX512
    {"avx512", Isa::avx512, has_avx512},
#endif
#if KVDB_WITH_AVX2
    {"avx2", Isa::avx2, has_avx2},
#endif
#if KVDB_WITH_AVX512_BF16
    {"amx_emulated", Isa::amx_emulated, has_avx512_bf16, true},
#endif
#elif defined(__aarch64__)
    {"neon", Isa::neon, always},
#endif
#if KVDB_WITH_PORTABLE
    {"portable", Isa::portable, always},
#endif
};

std::vector<std::string> names(bool emulated) {
    std::vector<std::string> found;
    for (const Candidate& candidate : kCandidates) {
        if (candidate.supported() && candidate.emulated == emulated) {
            found.emplace_back(candidate.name);
        }
    }
    return found;
}

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

constexpr const char* kOperationNames[kOperations] = {"decode", "prefill", "scan", "gather"};

struct Choice {
    std::atomic<const Candidate*> best;
    std::array<std::atomic<const Candidate*>, kOperations> of;

    Choice() {
        const char* forced = std::getenv("KVDB_ISA");
        if (forced && *forced) {
            use(find(forced, "KVDB_ISA: "));
            return;
        }
        for (const Candidate& candidate : kCandidates) {
            if (!candidate.supported() || candidate.emulated) continue;
            use(candidate);
            break;
        }
        if (!best) {
            throw std::runtime_error(
                "kvdb was compiled for another processor alone (KVDB_ISAS=native); compile it "
                "anew");
        }
        const Family* family = family_of(this_processor());
        for (int i = 0; family && i < kOperations; ++i) {
            const Isa isa = family->kernels[i];
            prefer(i, isa == Isa::amx && !amx_permitted() ? family->untiled : isa);
        }
    }

    void use(const Candidate& candidate) {
        best = &candidate;
        for (auto& chosen : of) chosen = &candidate;
    }

    // Those of the family's table that the operating system or a hypervisor hides are left out.
    void prefer(int operation, Isa isa) {
        for (const Candidate& candidate : kCandidates) {
            if (candidate.isa == isa && candidate.supported()) of[operation] = &candidate;
        }
    }
};

Choice& choice() {
    static Choice choice;
    return choice;
}

}  // namespace

std::vector<std::string> isas() {
    return names(false);
}

std::vector<std::string> emulated_isas() {
    return names(true);
}

Isa current_isa() {
    return choice().best.load(std::memory_order_relaxed)->isa;
}

std::string isa() {
    return choice().best.load(std::memory_order_relaxed)->name;
}

void set_isa(std::string_view name) {
    choice().use(find(name, "isa: "));
}

Isa current_isa(Operation operation) {
    return choice().of[static_cast<int>(operation)].load(std::memory_order_relaxed)->isa;
}

KernelNames chosen_kernels() {
    KernelNames used;
    for (int i = 0; i < kOperations; ++i)
        used.emplace_back(kOperationNames[i], choice().of[i].load()->name);
    return used;
}

KernelNames kernels_of(const Family& family) {
    KernelNames named;
    for (int i = 0; i < kOperations; ++i) {
        for (const Candidate& candidate : kCandidates)
            if (candidate.isa == family.kernels[i])
                named.emplace_back(kOperationNames[i], candidate.name);
    }
    return named;
}

std::vector<std::string> variants() {
    const Candidate* best = choice().best;
    std::vector<std::string> names{best->name};
    for (const Candidate* at = best + 1; at < std::end(kCandidates); ++at) {
        if (at->supported() && !at->emulated && at->isa != Isa::portable)
            names.emplace_back(at->name);
    }
    return names;
}

void set_kernels(std::string_view operation, std::string_view isa) {
    const Candidate& candidate = find(isa, "isa: ");
    const Candidate* best = choice().best;
    if (&candidate < best) {
        throw std::invalid_argument("isa: '" + std::string(isa) + "' is better than the " +
                                    best->name + " that is in use");
    }
    for (int i = 0; i < kOperations; ++i) {
        if (operation != kOperationNames[i]) continue;
        choice().of[i] = &candidate;
        return;
    }
    throw std::invalid_argument("operation: '" + std::string(operation) +
                                "' is unknown; use decode, prefill, scan or gather");
}

}  // namespace kvdb
