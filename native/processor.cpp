#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstring>

namespace kvdb {
namespace {

constexpr unsigned kAny = ~0u;

struct Row {
    const char* vendor;
    unsigned family;
    unsigned first_model, last_model;
    Family is;
};

constexpr Isa kPairs = Isa::avx512_bf16, kWidened = Isa::avx512, kTiles = Isa::amx;

// Dot products of bfloat16 pairs run at the full rate on Zen. On the Intel processors below they
// are slower than widening to float32 and multiplying: measured on Sapphire Rapids, whose core the
// others share. Their tiles are for many rows. Dot products of bytes, for codes, are fast on all of
// them. The first row that fits is taken: those of a vendor's other models come last, because a
// hypervisor may give any model number, and features tell more.
constexpr Row kRows[] = {
    {"AuthenticAMD", 0x19, 0x10, 0x1f, {"AMD Zen 4", {kPairs, kPairs, kPairs, kPairs}, kPairs}},
    {"AuthenticAMD", 0x19, 0x60, 0x7f, {"AMD Zen 4", {kPairs, kPairs, kPairs, kPairs}, kPairs}},
    {"AuthenticAMD", 0x19, 0xa0, 0xaf, {"AMD Zen 4", {kPairs, kPairs, kPairs, kPairs}, kPairs}},
    {"AuthenticAMD", 0x1a, 0x00, 0xff, {"AMD Zen 5", {kPairs, kPairs, kPairs, kPairs}, kPairs}},
    {"GenuineIntel",
     6,
     0x8f,
     0x8f,
     {"Intel Sapphire Rapids", {kWidened, kTiles, kPairs, kWidened}, kWidened}},
    {"GenuineIntel",
     6,
     0xcf,
     0xcf,
     {"Intel Emerald Rapids", {kWidened, kTiles, kPairs, kWidened}, kWidened}},
    {"GenuineIntel",
     6,
     0xad,
     0xae,
     {"Intel Granite Rapids", {kWidened, kTiles, kPairs, kWidened}, kWidened}},
    {"AuthenticAMD",
     kAny,
     0,
     kAny,
     {"AMD with AVX-512 BF16", {kPairs, kPairs, kPairs, kPairs}, kPairs}},
    {"GenuineIntel",
     kAny,
     0,
     kAny,
     {"Intel with AVX-512 BF16", {kWidened, kTiles, kPairs, kWidened}, kWidened}},
};

}  // namespace

const Family* family_of(const Processor& processor) {
    if (!processor.avx512_bf16) return nullptr;
    for (const Row& row : kRows) {
        if (processor.vendor == row.vendor &&
            (row.family == kAny || processor.family == row.family) &&
            processor.model >= row.first_model && processor.model <= row.last_model) {
            return &row.is;
        }
    }
    return nullptr;
}

Processor this_processor() {
    Processor is;
#if defined(__x86_64__)
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return is;
    char vendor[13] = {};
    std::memcpy(vendor, &ebx, 4);
    std::memcpy(vendor + 4, &edx, 4);
    std::memcpy(vendor + 8, &ecx, 4);
    is.vendor = vendor;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return is;
    is.family = eax >> 8 & 0xf;
    is.model = (eax >> 4 & 0xf) | (eax >> 16 & 0xf) << 4;
    if (is.family == 0xf) is.family += eax >> 20 & 0xff;
    is.avx512_bf16 = __builtin_cpu_supports("avx512bf16");
#endif
    return is;
}

}  // namespace kvdb
