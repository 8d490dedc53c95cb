// The query heads that one beam search answers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "graph.h"

namespace kvdb::indexes::graph {

inline constexpr float kNone = -__builtin_inff();

inline void prefetch(const void* from, std::int64_t bytes) {
    for (std::int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(static_cast<const std::byte*>(from) + i);
    }
}

// The query heads of one query that share a KV head, or some of them.
struct QueryGroup {
    const Graph& graph;
    const Probes& probes;
    const Blocks& blocks;
    const QueryRows& queries;
    const GraphOptions& options;
    int kv_head;
    std::int64_t query;        // of the batch
    int head, heads;           // of the group: [head, head + heads)
    std::int64_t visible;      // tokens the query sees
    const std::uint8_t* rows;  // or null: only those rows that are set
    bool scan;                 // all codes in order, no search

    bool has(std::int64_t r) const { return !rows || rows[r]; }
    bool sees(std::uint32_t token) const { return queries.visible(query, token); }
    std::int64_t row(std::int64_t r) const {
        return (kv_head * queries.group + head + r) * queries.n + query;
    }
    const float* q(std::int64_t r) const { return queries.q + row(r) * graph.head_dim; }
    const std::uint32_t* links(std::uint32_t token) const {
        return graph.links_of(kv_head) + std::int64_t{token} * graph.link_step;
    }
    const std::uint8_t* code(std::uint32_t token) const {
        return graph.codes_of(kv_head) + std::int64_t{token} * graph.code_step;
    }
    const std::int32_t* probe_tokens() const { return probes.tokens + kv_head * probes.count; }
    std::int64_t key_nbytes() const {
        return static_cast<std::int64_t>(blocks.geometry.key_row_bytes());
    }
};

}  // namespace kvdb::indexes::graph
