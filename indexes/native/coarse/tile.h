// A tile of queries, coded, and the page scores that a search computes for it.
#pragma once

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "kernels.h"
#include "search.h"
#include "workspace.h"

namespace kvdb::indexes::coarse {

inline constexpr float kNone = -__builtin_inff();
inline constexpr double kLog2E = 1.4426950408889634;

// One segment of one batch.
struct Segment {
    const Pages* pages;
    std::int64_t number;       // within its batch
    std::int64_t begin, end;   // tokens
    std::int64_t page_offset;  // pages of the segments before it
};

// One query of one head, coded.
struct CodedQuery {
    const float* q;
    std::int64_t i;    // which of the batch
    std::int64_t row;  // h * n + i
    std::vector<std::int8_t> bytes;
    std::int8_t radius[kChannelBlocks];
    ByteQuery center, length;
    float error;                   // length of what coding took away
    float norm;                    // |q|
    float blocks[kChannelBlocks];  // the squared length of each channel block

    void code(int head_dim, bool box);
};

// Queries [i0, i0 + n) of every head. Rows of each KV head: [group][n].
class Tile {
  public:
    Tile(const std::vector<Segment>& segments, const QueryRows& queries, const Geometry& geometry,
         std::int64_t i0, std::int64_t n, bool box, bool priorities);

    std::int64_t i0, n;
    int rows;                         // of each KV head
    std::vector<CodedQuery> queries;  // [kv_heads][rows]

    const CodedQuery& query(int kv_head, int r) const { return queries[kv_head * rows + r]; }

    // Of one KV head in one segment.
    struct View {
        std::int64_t pages;
        float* counts;  // [n][pages]
        float *middle_, *reach_, *priority_, *best_;
        float* middle(int r) const { return middle_ + r * pages; }
        float* reach(int r) const { return reach_ + r * pages; }
        float* best(int r) const { return best_ + r * (pages / kPageGroup); }
        float priority(int r, std::int64_t p, float margin) const {
            if (priority_) return priority_[r * pages + p];
            return middle_[r * pages + p] + margin * reach_[r * pages + p];
        }
        // A bit for each page of a group whose priority is not below the threshold.
        std::uint32_t reaching(int r, std::int64_t group, float margin, float threshold) const {
            const std::int64_t at = r * pages + group * kPageGroup;
            const float* priority = priority_ ? priority_ + at : nullptr;
            return coarse_kernels().reaching(
                {middle_ + at, reach_ + at, priority, margin, threshold});
        }
        // At most so much less is the same priority where it is computed elsewhere, with product
        // and sum fused or not.
        float rounding(int r, std::int64_t p) const {
            return 0x1p-21f * (std::fabs(middle_[r * pages + p]) + reach_[r * pages + p] + 1e-30f);
        }
    };
    View view(const Segment& segment, int kv_head) const;

  private:
    std::int64_t pages_ = 0;  // of all segments
    float *counts_, *middle_, *reach_, *priority_, *best_;
};

// Which tokens of a segment a query of a tile sees.
class Visibility {
  public:
    Visibility(const QueryRows& queries, const Segment& segment);

    // Whether all of the segment, or nothing.
    bool whole(std::int64_t i) const { return !hidden_ && begin(i) == 0 && end(i) == tokens_; }
    bool hides() const { return hidden_; }  // some of its tokens
    bool none(std::int64_t i) const { return begin(i) >= end(i); }
    bool sees(std::int64_t i, std::int64_t member) const {
        return member >= begin(i) && member < end(i) &&
               !(hidden_ && queries_.is_hidden(segment_.begin + member));
    }
    // counts[pages] of query i.
    void count(std::int64_t i, const PageSet& set, std::int64_t pages, float* counts) const;

    std::int64_t begin(std::int64_t i) const { return within(queries_.begin[i]); }  // members
    std::int64_t end(std::int64_t i) const { return within(queries_.end[i]); }
    // From the first to the last that some of queries [i, i + n) sees.
    std::pair<std::int64_t, std::int64_t> span(std::int64_t i, std::int64_t n) const;

  private:
    std::int64_t within(std::int64_t token) const {
        const std::int64_t member = token - segment_.begin;
        return member < 0 ? 0 : member > tokens_ ? tokens_ : member;
    }

    const QueryRows& queries_;
    const Segment& segment_;
    std::int64_t tokens_;
    bool hidden_;
};

}  // namespace kvdb::indexes::coarse
