#include "checksum.h"

#include <array>
#include <bit>
#include <cstring>

#include "isa.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace kvdb {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected
constexpr std::size_t kWord = sizeof(std::uint64_t);

using Byte = unsigned char;
using Tables = std::array<std::array<std::uint32_t, 256>, kWord>;

// Slicing by eight: tables[j][b] is what byte b adds when j bytes of the word follow it.
constexpr Tables make_tables() {
    Tables tables{};
    for (std::uint32_t b = 0; b < 256; ++b) {
        std::uint32_t crc = b;
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
        tables[0][b] = crc;
    }
    for (std::size_t j = 1; j < kWord; ++j) {
        for (std::size_t b = 0; b < 256; ++b) {
            const std::uint32_t crc = tables[j - 1][b];
            tables[j][b] = crc >> 8 ^ tables[0][crc & 255];
        }
    }
    return tables;
}

constexpr Tables kTables = make_tables();

std::uint64_t word_at(const Byte* at) {
    std::uint64_t word;
    std::memcpy(&word, at, kWord);
    return word;
}

std::uint32_t crc_portable(const Byte* at, std::size_t nbytes) {
    std::uint32_t crc = ~0u;
    for (; nbytes >= kWord; nbytes -= kWord, at += kWord) {
        std::uint64_t word = word_at(at) ^ crc;
        crc = 0;
        for (std::size_t j = kWord; j-- > 0; word >>= 8) crc ^= kTables[j][word & 255];
    }
    for (; nbytes > 0; --nbytes, ++at) crc = crc >> 8 ^ kTables[0][(crc ^ *at) & 255];
    return ~crc;
}

#if defined(__x86_64__)

// The instruction takes three cycles, and one can start in each cycle: at least three blocks are
// summed at the same time, so that no sums of pieces have to be joined.
template <int lanes>
__attribute__((target("sse4.2"))) void crc_blocks(const std::uint64_t* addresses,
                                                  std::size_t nbytes, std::uint32_t* out) {
    const Byte* at[lanes];
    std::uint64_t crc[lanes];
    for (int i = 0; i < lanes; ++i) {
        at[i] = reinterpret_cast<const Byte*>(addresses[i]);
        crc[i] = ~0u;
    }
    std::size_t done = 0;
    for (; done + kWord <= nbytes; done += kWord) {
        for (int i = 0; i < lanes; ++i) crc[i] = _mm_crc32_u64(crc[i], word_at(at[i] + done));
    }
    for (int i = 0; i < lanes; ++i) {
        auto last = static_cast<std::uint32_t>(crc[i]);
        for (std::size_t j = done; j < nbytes; ++j) last = _mm_crc32_u8(last, at[i][j]);
        out[i] = ~last;
    }
}

bool crc_fast(const std::uint64_t* addresses, std::int64_t count, std::size_t nbytes,
              std::uint32_t* out) {
    constexpr int kLanes = 4;
    if (current_isa() == Isa::portable) return false;  // every other one here has SSE4.2
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) crc_blocks<kLanes>(addresses + i, nbytes, out + i);
    for (; i < count; ++i) crc_blocks<1>(addresses + i, nbytes, out + i);
    return true;
}

#else

bool crc_fast(const std::uint64_t*, std::int64_t, std::size_t, std::uint32_t*) {
    return false;
}

#endif

}  // namespace

void crc32c(const std::uint64_t* addresses, std::int64_t count, std::size_t nbytes,
            std::uint32_t* out) {
    if (crc_fast(addresses, count, nbytes, out)) return;
    for (std::int64_t i = 0; i < count; ++i) {
        out[i] = crc_portable(reinterpret_cast<const Byte*>(addresses[i]), nbytes);
    }
}

}  // namespace kvdb
