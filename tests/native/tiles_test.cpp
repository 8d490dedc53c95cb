// The emulated tiles against the definition of the instruction, pair by pair.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "simd/emulated_tiles.h"

using namespace kvdb;

namespace {

struct Sixteen : simd::Generic<Sixteen, 16> {
    static f32 fma(f32 a, f32 b, f32 c) {  // as processors with tiles have it, rounded once
        for (int i = 0; i < 16; ++i) c[i] = std::fma(a[i], b[i], c[i]);
        return c;
    }
};
using Tiles = simd::EmulatedTiles<Sixteen>;
using Pairs = std::uint16_t[16][16][2];
using Sums = float[16][16];

float flushed(float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

float widened(std::uint16_t bits) {
    return flushed(std::bit_cast<float>(std::uint32_t{bits} << 16));
}

// Even and odd elements are summed apart, from zero on; then both, then what was there before.
float expected(const Pairs& a, const Pairs& b, int m, int n, float before) {
    float sums[2] = {};
    for (int k = 0; k < 16; ++k) {
        for (int i = 0; i < 2; ++i) {
            sums[i] = flushed(std::fma(widened(a[m][k][i]), widened(b[k][n][i]), sums[i]));
        }
    }
    return flushed(flushed(before) + flushed(sums[0] + sums[1]));
}

// bfloat16 whose exponents lie between two biased ones, with either sign.
void fill(Pairs& pairs, std::mt19937& random, int least, int most) {
    std::uniform_int_distribution<int> exponent(least, most), rest(0, 255);
    for (auto& row : pairs) {
        for (auto& pair : row) {
            for (auto& bits : pair) {
                const int low = rest(random);
                bits = static_cast<std::uint16_t>((low & 128) << 8 | exponent(random) << 7 |
                                                  (low & 127));
            }
        }
    }
}

void check(int least, int most) {
    std::mt19937 random(static_cast<unsigned>(least));
    Pairs a, b;
    Sums before, after;
    fill(a, random, least, most);
    fill(b, random, least, most);
    for (auto& row : before) {
        for (float& sum : row)
            sum = std::ldexp(static_cast<float>(random() % 4096), 2 * (least - 127));
    }
    Tiles tiles;
    tiles.load<0>(before, 64);
    tiles.load<1>(a, 64);
    tiles.load<2>(b, 64);
    tiles.dot_pairs<0, 1, 2>();
    tiles.store<0>(after, 64);
    for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 16; ++n) CHECK(after[m][n] == expected(a, b, m, n, before[m][n]));
    }
}

}  // namespace

TEST_CASE("a product of tiles rounds as the instruction does") {
    check(120, 134);
    check(100, 150);
}

TEST_CASE("a product of bytes is that of signed with unsigned ones, and wraps around") {
    std::mt19937 random(7);
    std::uint8_t a[16][64], b[16][64];
    std::int32_t before[16][16], after[16][16];
    for (auto* bytes : {&a, &b}) {
        for (auto& row : *bytes) {
            for (std::uint8_t& byte : row) byte = static_cast<std::uint8_t>(random());
        }
    }
    for (auto& row : before) {
        for (std::int32_t& sum : row) sum = static_cast<std::int32_t>(random());
    }
    before[3][4] = std::numeric_limits<std::int32_t>::max();
    Tiles tiles;
    tiles.load<0>(before, 64);
    tiles.load<1>(a, 64);
    tiles.load<2>(b, 64);
    tiles.dot_bytes<0, 1, 2>();
    tiles.store<0>(after, 64);
    for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 16; ++n) {
            std::int64_t sum = before[m][n];
            for (int k = 0; k < 16; ++k) {
                for (int j = 0; j < 4; ++j) {
                    sum +=
                        std::int64_t{static_cast<std::int8_t>(a[m][4 * k + j])} * b[k][4 * n + j];
                }
            }
            CHECK(after[m][n] == static_cast<std::int32_t>(static_cast<std::uint64_t>(sum)));
        }
    }
}

TEST_CASE("denormal numbers are zero, in and out") {
    check(0, 66);
    check(56, 66);
}

TEST_CASE("rows lie a stride apart, and what is not a number stays in its row") {
    float rows[16][20] = {}, sums[16][16];
    Pairs ones;
    for (auto& row : ones) {
        for (auto& pair : row) pair[0] = pair[1] = 0x3f80;
    }
    for (int r = 0; r < 16; ++r) rows[r][3] = std::bit_cast<float>(std::uint32_t{0x3f80});
    rows[5][0] = std::bit_cast<float>(std::uint32_t{0x7fc0});
    Tiles tiles;
    tiles.zero<3>();
    tiles.load<4>(rows, sizeof rows[0]);
    tiles.load<5>(ones, 64);
    tiles.dot_pairs<3, 4, 5>();
    tiles.store<3>(sums, 64);
    for (int r = 0; r < 16; ++r) CHECK((r == 5 ? std::isnan(sums[r][0]) : sums[r][0] == 1));
}
