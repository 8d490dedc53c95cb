// What passes through a ring in shared memory, as kvdb/rpc/shared_records.py has it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvdb {

inline constexpr std::uint32_t kAttend = 3;  // a `Kind`
inline constexpr std::uint32_t kHasStart = 1;
inline constexpr std::uint64_t kAlignment = 64;  // of arrays in the arena
inline constexpr std::uint64_t kErrorRoom = 16 << 10;

// seconds: how long the client waits. request: what the client calls it, 0 for nothing.
struct SharedRequest {
    std::uint64_t generation, number;
    std::uint32_t kind, flags;
    std::int64_t start;
    std::uint64_t tokens, q, k, v, message, message_bytes, reply, reply_room, layer;
    double seconds;
    std::uint64_t request, unused;
};

// error: the class of an error, zeros for none. The times are microseconds. busy: how many
// processors the server's answers to this client and others take, 0 where it does not say.
struct SharedAnswer {
    std::uint64_t generation, number;
    std::array<char, 24> error;
    std::uint64_t reply_bytes;
    float queue_us, engine_us, kernel_us;
    std::uint32_t busy;
};

static_assert(sizeof(SharedRequest) == 128 && offsetof(SharedRequest, seconds) == 104);
static_assert(sizeof(SharedAnswer) == 64 && offsetof(SharedAnswer, queue_us) == 48);

}  // namespace kvdb
