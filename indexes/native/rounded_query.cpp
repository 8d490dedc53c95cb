#include "rounded_query.h"

#include <algorithm>
#include <cmath>

#include "rotate.h"

namespace kvdb::indexes {

RoundedQuery round_query(const float* q, int head_dim, float* rest) {
    RoundedQuery made{};
    std::copy_n(q, head_dim, rest);
    rotate(rest, head_dim);
    float largest = 0;
    for (int i = 0; i < head_dim; ++i) largest = std::max(largest, std::fabs(rest[i]));
    made.step = largest / 127;
    const float inverse = largest > 1e-30f ? 127 / largest : 0;
    std::int8_t bytes[kHeadDimMax];
    int sum = 0;
    for (int i = 0; i < head_dim; ++i) {
        const float nearest = std::nearbyint(rest[i] * inverse);
        // Not a number where rotating overflowed.
        const float rounded = nearest == nearest ? std::clamp(nearest, -127.0f, 127.0f) : 0;
        bytes[i] = static_cast<std::int8_t>(rounded);
        sum += bytes[i];
        rest[i] -= rounded * made.step;
    }
    std::copy_n(bytes, head_dim, reinterpret_cast<std::int8_t*>(made.packed));
    made.sum = static_cast<float>(sum);
    return made;
}

}  // namespace kvdb::indexes
