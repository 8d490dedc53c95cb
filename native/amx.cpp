#include "amx.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvdb {

#if defined(__x86_64__) && defined(__linux__)
namespace {

constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;  // of leaf 7, edx
constexpr unsigned kOsXsave = 1u << 27;                                            // of leaf 1, ecx
constexpr unsigned kTileState = 3u << 17;                    // of XCR0: configuration and data
constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl

bool has_tiles() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & kOsXsave)) return false;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    constexpr unsigned wanted = kAmxBf16 | kAmxTile | kAmxInt8;
    if ((edx & wanted) != wanted) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & kTileState) == kTileState;
}

}  // namespace

bool amx_permitted() {
    static const bool permitted =
        has_tiles() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return permitted;
}
#else
bool amx_permitted() {
    return false;
}
#endif

}  // namespace kvdb
