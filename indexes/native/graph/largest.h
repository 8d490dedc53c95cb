// The largest of many scores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

namespace kvdb::indexes::graph {

// The maxima of every kLanes-th score, so that the compiler can use vectors.
class Lanes {
  public:
    Lanes(const float* scores, std::int64_t count) {
        std::fill_n(largest_, kLanes, -__builtin_inff());
        std::int64_t t = 0;
        for (; t + kLanes <= count; t += kLanes) {
            for (int l = 0; l < kLanes; ++l) largest_[l] = std::max(largest_[l], scores[t + l]);
        }
        for (int l = 0; t + l < count; ++l) largest_[l] = std::max(largest_[l], scores[t + l]);
    }

    float largest() const { return *std::max_element(largest_, largest_ + kLanes); }

    // At least `place` of the scores are as large.
    float least_of(int place) {
        std::nth_element(largest_, largest_ + place - 1, largest_ + kLanes, std::greater<>());
        return largest_[place - 1];
    }

  private:
    static constexpr int kLanes = 32;
    float largest_[kLanes];
};

// Where the `most` largest stand, largest first; returns how many there are.
template <int most>
int find_largest(const float* scores, std::int64_t count, std::int32_t (&top)[most]) {
    const float least = Lanes(scores, count).least_of(most);
    int have = 0;
    for (std::int32_t t = 0; t < count; ++t) {
        if (scores[t] < least || (have == most && scores[t] <= scores[top[most - 1]])) continue;
        int at = have < most ? have++ : most - 1;
        for (; at > 0 && scores[top[at - 1]] < scores[t]; --at) top[at] = top[at - 1];
        top[at] = t;
    }
    return have;
}

}  // namespace kvdb::indexes::graph
