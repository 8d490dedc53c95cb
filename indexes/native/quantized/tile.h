// A few queries of every KV head, and the scores of all tokens for them.
#pragma once

#include <vector>

#include "search.h"

namespace kvdb::indexes::quantized {

inline constexpr float kNone = -__builtin_inff();
inline constexpr double kLog2E = 1.4426950408889634;

struct Row {
    std::int64_t number;  // of all rows
    std::int64_t i;       // of the query
    const float* q;
    float norm;   // of the query, rounded up
    float error;  // of what rounding took from it, rounded up
    RoundedQuery query;
    // Of the result.
    std::vector<std::int32_t> ids;
    std::vector<float> scores;
    bool dense = false;
    float known = kNone;  // log2 of the mass outside and of the tokens retrieved
};

// Memory of floats that a thread keeps from call to call; what it holds is arbitrary.
class Scratch {
  public:
    float* reserve(std::size_t count) {
        if (memory_.size() < count) memory_ = std::vector<float>(count);
        return memory_.data();
    }

  private:
    std::vector<float> memory_;
};

// One at a time in each thread.
class Tile {
  public:
    // Queries [first, first + count).
    Tile(const Blocks& blocks, const Codes& codes, const QueryRows& queries,
         const SearchOptions& options, std::int64_t first, std::int64_t count);

    // Estimates all scores; exactly, where the options say so. Tokens that a row does not see have
    // -inf.
    void scan();

    const Blocks& blocks;
    const Codes& codes;
    const QueryRows& queries;
    const SearchOptions& options;
    const bool exact;  // scores are
    const std::int64_t chunks;
    const int each;          // rows of each KV head
    std::vector<int> heads;  // that are active
    std::vector<Row> rows;   // [heads][each]

    Row& row(std::int64_t head, int r) { return rows[head * each + r]; }
    const Row& row(std::int64_t head, int r) const { return rows[head * each + r]; }
    // [chunks * kChunk]
    float* scores(std::int64_t head, int r) { return scores_ + at(head, r) * kChunk; }
    // The largest of each stratum, as they were estimated: [chunks * kStrata]
    const float* largest(std::int64_t head, int r) const {
        return largest_ + at(head, r) * kStrata;
    }
    // How far the scores of each run may be from the truth: [chunks * kRuns]
    const float* slack(std::int64_t head, int r) const { return slack_ + at(head, r) * kRuns; }
    // Whether a run of a chunk has no codes.
    bool is_raw(std::int64_t chunk, int kv_head, int run) const;
    // Exact scores of tokens of a KV head for some rows, [rows][stride].
    void score(std::int64_t head, int r, int count, const std::vector<std::int32_t>& tokens,
               float* out, std::int64_t stride) const;
    // How many tokens a query sees.
    std::int64_t visible(std::int64_t i) const;

  private:
    std::int64_t at(std::int64_t head, int r) const { return (head * each + r) * chunks; }
    void scan_chunk(std::int64_t head, std::int64_t chunk);
    void bound(const Row& row, const Codes& chunk, float centre, float* slack) const;
    void score_run(std::int64_t head, std::int64_t chunk, int run);
    // Returns whether any token was taken out.
    bool hide(const Row& row, std::int64_t chunk, float* scores) const;

    float *scores_, *largest_, *slack_;
};

}  // namespace kvdb::indexes::quantized
