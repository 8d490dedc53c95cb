// What coding a vector takes: a fixed rotation after which no dimension stands out, and rounding up
// to bfloat16.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvdb::indexes {

// A Walsh-Hadamard transform of `width` numbers, a power of two.
inline void hadamard(float* x, int width) {
    for (int half = 1; half < width; half *= 2) {
        for (int i = 0; i < width; i += 2 * half) {
            for (int j = i; j < i + half; ++j) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
        }
    }
}

// Multiplies `width` numbers by 1 / sqrt(width), and about half of them by -1.
inline void flip_signs(float* x, int width) {
    const float unit = 1 / std::sqrt(static_cast<float>(width));
    std::uint32_t bits = 0x9e3779b9u;
    for (int i = 0; i < width; ++i) {
        bits = bits * 1664525u + 1013904223u;
        x[i] *= bits >> 31 ? -unit : unit;
    }
}

// How many dimensions are transformed at a time.
inline int rotated_width(int head_dim) {
    int width = 8;
    while (2 * width <= head_dim) width *= 2;
    return width;
}

// Flips signs, and applies a Walsh-Hadamard transform, for the first and for the last 2^n
// dimensions.
inline void rotate(float* x, int head_dim) {
    const int width = rotated_width(head_dim);
    for (float* at = x; at; at = at == x && width < head_dim ? x + head_dim - width : nullptr) {
        flip_signs(at, width);
        hadamard(at, width);
    }
}

// Takes a rotation back.
inline void unrotate(float* x, int head_dim) {
    const int width = rotated_width(head_dim);
    for (float* at = x + head_dim - width; at; at = at == x ? nullptr : x) {
        hadamard(at, width);
        flip_signs(at, width);
    }
}

// The smallest bfloat16 that is at least x >= 0, as its bits.
inline std::uint16_t bfloat16_up(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<std::uint16_t>((bits + 0xffff) >> 16);
}

inline float from_bfloat16(std::uint16_t half) {
    const std::uint32_t bits = std::uint32_t{half} << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

}  // namespace kvdb::indexes
