// The queries of a search, and the tokens it retrieves.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvdb::indexes {

// The queries of one call. Rows are [q_heads][n]; those of KV head h's group lie together.
struct QueryRows {
    const float* q;  // [q_heads][n][head_dim]
    std::int64_t n;
    int group;                  // query heads for each KV head
    const std::int64_t* begin;  // [n], query i sees tokens [begin[i], end[i])
    const std::int64_t* end;
    const std::uint64_t*
        hidden;                // or null: bit t % 64 of word t / 64 is set when token t is hidden
    const float* floor;        // [q_heads][n] the largest q.k seen elsewhere, -inf for none
    const bool* active_heads;  // or null: [kv_heads] whether the head's rows are to be answered

    std::int64_t rows() const { return group * n; }  // of each KV head
    bool visible(std::int64_t i, std::int64_t token) const {
        return begin[i] <= token && token < end[i] && !is_hidden(token);
    }
    bool is_hidden(std::int64_t token) const {
        return hidden && (hidden[token / 64] >> (token % 64) & 1);
    }
    // A caller's bytes may be other than 0 and 1.
    bool is_active(int kv_head) const {
        return !active_heads || reinterpret_cast<const unsigned char*>(active_heads)[kv_head] != 0;
    }
    // The KV heads whose rows are to be answered. The others cost nothing and find nothing.
    std::vector<int> heads(int kv_heads) const {
        std::vector<int> heads;
        for (int head = 0; head < kv_heads; ++head) {
            if (is_active(head)) heads.push_back(head);
        }
        return heads;
    }
};

// What a search is asked for.
struct SearchOptions {
    enum class Retrieval : int { everything, range, top_k, top_p };
    Retrieval retrieval;
    double parameter;      // beta in units of q.k, k, or p
    float scale;           // of the softmax
    float margin;          // the share of the bound on an estimate's error that is given to it
    const float* outside;  // [q_heads][n] log of the sum of exp(scale * q.k) elsewhere
    bool tail, tight, give_up;
};

// Retrieved tokens: ids and exact scores, row after row.
struct RetrievedRows {
    std::vector<std::int64_t> offsets{0};  // [q_heads * n + 1]
    std::vector<std::int32_t> ids;
    std::vector<float> scores;

    void reserve(std::int64_t tokens) {
        ids.reserve(tokens);
        scores.reserve(tokens);
    }
    // Adds the next row.
    void append(const std::vector<std::int32_t>& row_ids, const std::vector<float>& row_scores) {
        ids.insert(ids.end(), row_ids.begin(), row_ids.end());
        scores.insert(scores.end(), row_scores.begin(), row_scores.end());
        offsets.push_back(static_cast<std::int64_t>(ids.size()));
    }
};

// What a search returns. missed, bound: the log of the sum of exp(scale * q.k) over the visible
// tokens that were not retrieved, as an estimate and as a bound that is never below the truth.
struct SearchResult {
    RetrievedRows retrieved;
    std::int64_t scanned = 0, nbytes = 0;
    std::vector<float> missed, bound;  // [q_heads * n]
    std::vector<float> tail;  // [q_heads * n][value_dim] estimated attention over them, or empty
    std::vector<std::uint8_t> dense;  // [q_heads * n] whether the row was given up

    // Rows that miss nothing, with tails of zeros unless tail_dims is 0.
    void resize(std::int64_t rows, int tail_dims) {
        missed.assign(rows, -std::numeric_limits<float>::infinity());
        bound = missed;
        tail.assign(rows * tail_dims, 0);
        dense.assign(rows, 0);
    }
    // Sets what a row missed. The bound is rounded up by more than float32 may have rounded it
    // down; it stands for an estimate that is larger, or beyond what numbers hold.
    void set_missed(std::int64_t row, double estimate, double upper) {
        constexpr float none = -std::numeric_limits<float>::infinity();
        if (upper > none) upper += 1e-5 + 1e-6 * std::fabs(upper);
        const auto missed_here = static_cast<float>(estimate);
        bound[row] = static_cast<float>(upper);
        const bool unknown = missed_here == none && bound[row] > none;
        missed[row] = unknown ? bound[row] : std::min(missed_here, bound[row]);
    }
};

}  // namespace kvdb::indexes
