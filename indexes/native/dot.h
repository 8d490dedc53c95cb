// Inner products and lengths in double, for numbers that others are bounded by.
#pragma once

#include <cmath>

#include "geometry.h"

namespace kvdb::indexes {

// Sums in as many lanes as n is a multiple of.
inline double dot(const float* x, const float* y, int n) {
    double sums[kHeadDimStep] = {};
    for (int i = 0; i < n; i += kHeadDimStep) {
        for (int j = 0; j < kHeadDimStep; ++j) sums[j] += double{x[i + j]} * y[i + j];
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

inline double length(const float* x, int n) {
    return std::sqrt(dot(x, x, n));
}

}  // namespace kvdb::indexes
