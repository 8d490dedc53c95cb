// One query of one layer, by a plan that was prepared: some blocks are read whole, indexes search
// the others, and everything is merged.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "../attend/attend.h"
#include "searcher.h"

namespace kvdb {

// Blocks that are read whole. The placement's arrays belong to the caller.
struct StepBlocks {
    std::vector<std::uint64_t> table;
    std::vector<std::int32_t> counts;
    std::optional<Placement> placement;
};

// How a query is turned back for keys that stand elsewhere than they were computed at.
struct StepTurn {
    std::vector<float> cos, sin;  // [pairs]
    bool interleaved;
};

// Which of the tokens found count once every search was made: those within `parameter` of the
// largest q.k, or the largest of so many. Searches with the same cut are cut together.
struct StepCut {
    enum class Kind : int { range, top_k };
    Kind kind;
    double parameter;
    bool operator==(const StepCut&) const = default;
};

// Tokens [begin, end) of an index, which lie in `blocks`.
struct StepSearch {
    const indexes::Searcher* searcher;
    std::int64_t begin, end;
    StepBlocks blocks;
    std::vector<std::uint8_t> active_heads;  // [kv_heads], or empty: which heads are searched
    std::vector<std::uint64_t> hidden;       // a bit for each token of the index, or empty
    bool observed;                           // whether it is told what a query showed of it
    std::optional<StepTurn> turn;
    std::optional<StepCut> cut;  // of what it finds, where it estimates nothing
};

// Tokens that are read whole for some KV heads, while they are searched for others.
struct StepWhole {
    StepBlocks blocks;
    std::int64_t tokens;
    std::vector<std::uint8_t> heads;  // [kv_heads]
};

// What a query and its searches show for nothing: the logarithms of the query's length and of the
// mass that was read, that of the bound on what was not, relative to it, and the largest score,
// but for the sinks.
constexpr int kSigns = 4;

struct StepPlan {
    Geometry geometry{};
    int q_heads;
    float scale;
    StepBlocks window;        // read whole, with what the run has from block `grows_from` on
    std::int64_t grows_from;  // -1: nothing
    StepBlocks sinks;         // of the window, but a range does not begin at their scores
    std::vector<StepSearch> searches;
    std::vector<StepWhole> whole;
    std::int64_t tokens;        // that are searched; spans searched by several indexes count once
    std::vector<float> guards;  // [kv_heads], or empty: the log of what a head may miss, relative
                                // to what it reads
    std::vector<float> ranges;  // [2][kSigns][q_heads], or empty: the least and the largest sign
                                // for which the plan was proven
    double found_share_max;     // of the searched tokens: more are read whole
    double whole_share_max;     // of the searched tokens and KV heads: more, and all are
    double bound_max;           // of the mass that is left out, proven; infinite for none

    int rows_of_head() const { return q_heads / geometry.kv_heads; }
    bool observes() const {
        return std::any_of(searches.begin(), searches.end(),
                           [](const StepSearch& search) { return search.observed; });
    }
};

// What is done about KV heads of which a sign is outside of its range.
enum class Unlike { read_whole, refused, answered };

// The query, the run as it is now, and where the answer goes. All arrays are contiguous.
struct StepCall {
    Rows query;                  // [q_heads][1][head_dim] of the geometry's type
    const std::uint64_t* table;  // of the run
    const std::int32_t* counts;
    std::int64_t blocks;
    std::int64_t unseen = 0;  // how many of the window's last tokens come after the query
    const float* sinks;       // optional, [q_heads]; see AttendCall. They count as read
    void* out;                // [q_heads][1][value_dim] of the geometry's type
    float* lse;               // [q_heads]
    float* read_lse;          // [q_heads] over the tokens read, without estimates
    float* missed;            // [q_heads] log of the estimated sum that was left out
    bool observed = false;    // whether the result shows what the query wanted
    Unlike unlike = Unlike::read_whole;
};

enum class StepEnd { answered, reads_everything, not_finite, bound_exceeded, unlike };

// What a query showed that is observed. Where everything is to be read, `top` holds nothing.
struct StepShown {
    std::vector<float> window_top, top;  // [q_heads] the largest q.k of the window, and of all read
    std::vector<std::vector<std::uint8_t>> dense;  // of each search the rows that it gave up
};

struct StepResult {
    StepEnd end = StepEnd::answered;
    std::vector<indexes::SearchResult> found;  // of each search that was made
    std::vector<std::int64_t> found_ns;
    // Tokens that were looked at and attended, and bytes read; a token counts once for each group
    // of query heads that shared its read. Where everything is to be read, what was spent so far.
    double scanned = 0, retrieved = 0;
    std::int64_t nbytes = 0;
    // The time of the searches and of what follows them: what was found is gathered and merged. Of
    // steps together, an equal part each.
    std::int64_t search_ns = 0, gather_ns = 0;
    Share missed{0, 0}, bound{0, 0};
    StepShown shown;
    std::vector<float> signs;          // [kSigns][q_heads], NaN where a search gave up
    std::vector<std::uint8_t> unlike;  // [kv_heads], those that were outside of their ranges

    // [q_heads] the rows that some search gave up.
    std::vector<std::uint8_t> given_up() const;
};

// A call and the plan that answers it.
struct PlannedCall {
    const StepPlan* plan;
    StepCall call;
};

// Where the end is not `answered`, out and lse hold nothing, and read_lse and missed only where a
// bound is exceeded. Searches of several that ask one index for the same are one search.
std::vector<StepResult> run_steps(const std::vector<PlannedCall>& calls);

}  // namespace kvdb
