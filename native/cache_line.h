// Keeping apart what different threads write.
#pragma once

#include <cstddef>

namespace kvdb {

// Bytes between two things that different threads write: two cache lines, because processors fetch
// lines in pairs.
inline constexpr std::size_t kApart = 128;

// What one thread writes while its neighbours in an array write theirs.
template <class T>
struct alignas(kApart) Apart {
    T value;
};

}  // namespace kvdb
