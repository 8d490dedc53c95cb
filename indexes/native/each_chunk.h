// Going through the tokens of all KV heads chunk by chunk, in parallel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "blocks.h"
#include "chunks.h"
#include "thread_pool.h"

namespace kvdb::indexes {

// body(kv_head, begin, end) for the tokens from `from` on, cut at the borders of chunks.
template <class Body>
void each_chunk(const Blocks& blocks, std::int64_t from, Body&& body) {
    const std::int64_t first = from / kChunk;
    const std::int64_t chunks = chunks_of(blocks.tokens) - first;
    if (chunks <= 0) return;
    ThreadPool& pool = ThreadPool::instance();
    const int heads = blocks.geometry.kv_heads;
    const int threads = (blocks.tokens - from) * heads < 256 ? 1 : pool.threads();
    pool.run(chunks * heads, threads, [&](std::int64_t item, int) {
        const std::int64_t chunk = first + item / heads;
        body(static_cast<int>(item % heads), std::max(from, chunk * kChunk),
             std::min(blocks.tokens, (chunk + 1) * kChunk));
    });
}

}  // namespace kvdb::indexes
