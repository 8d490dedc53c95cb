#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstring>

namespace kvdb {

#if defined(__x86_64__)
namespace {

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
// them.
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
};

}  // namespace

const Family* processor_family() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return nullptr;
    char vendor[13] = {};
    std::memcpy(vendor, &ebx, 4);
    std::memcpy(vendor + 4, &edx, 4);
    std::memcpy(vendor + 8, &ecx, 4);
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return nullptr;
    unsigned family = eax >> 8 & 0xf;
    const unsigned model = (eax >> 4 & 0xf) | (eax >> 16 & 0xf) << 4;
    if (family == 0xf) family += eax >> 20 & 0xff;
    for (const Row& row : kRows) {
        if (std::strcmp(vendor, row.vendor) == 0 && family == row.family &&
            model >= row.first_model && model <= row.last_model) {
            return &row.is;
        }
    }
    return nullptr;
}
#else
const Family* processor_family() {
    return nullptr;
}
#endif

}  // namespace kvdb
