// Tokens in chunks of equal length, for the kinds that code all of them.
#pragma once

#include <cstdint>

namespace kvdb::indexes {

inline constexpr int kChunk = 1024;  // tokens

constexpr std::int64_t chunks_of(std::int64_t tokens) {
    return (tokens + kChunk - 1) / kChunk;
}

}  // namespace kvdb::indexes
