// A fixed rotation after which no dimension stands out, and rounding up to bfloat16.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvdb::indexes {

// Flips signs, and applies a Walsh-Hadamard transform to the first and to the last 2^n dimensions.
inline void rotate(float* x, int head_dim) {
    int width = 8;
    while (2 * width <= head_dim) width *= 2;
    const float length = 1 / std::sqrt(static_cast<float>(width));
    for (float* at = x; at; at = at == x && width < head_dim ? x + head_dim - width : nullptr) {
        std::uint32_t bits = 0x9e3779b9u;
        for (int i = 0; i < width; ++i) {
            bits = bits * 1664525u + 1013904223u;
            at[i] *= bits >> 31 ? -length : length;
        }
        for (int half = 1; half < width; half *= 2) {
            for (int i = 0; i < width; i += 2 * half) {
                for (int j = i; j < i + half; ++j) {
                    const float a = at[j], b = at[j + half];
                    at[j] = a + b;
                    at[j + half] = a - b;
                }
            }
        }
    }
}

// Takes a rotation back.
inline void unrotate(float* x, int head_dim) {
    int width = 8;
    while (2 * width <= head_dim) width *= 2;
    const float length = 1 / std::sqrt(static_cast<float>(width));
    for (float* at = x + head_dim - width; at; at = at == x ? nullptr : x) {
        for (int half = 1; half < width; half *= 2) {
            for (int i = 0; i < width; i += 2 * half) {
                for (int j = i; j < i + half; ++j) {
                    const float a = at[j], b = at[j + half];
                    at[j] = a + b;
                    at[j + half] = a - b;
                }
            }
        }
        std::uint32_t bits = 0x9e3779b9u;
        for (int i = 0; i < width; ++i) {
            bits = bits * 1664525u + 1013904223u;
            at[i] *= bits >> 31 ? -length : length;
        }
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
