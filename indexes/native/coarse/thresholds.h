// From which score on tokens are wanted, and from which priority on pages are read.
#pragma once

#include "density.h"

namespace kvdb::indexes {

class Thresholds {
  public:
    explicit Thresholds(Items& items) : items_(items), density_(items) {}

    // Plans every row of a KV head.
    void find(int kv_head);

  private:
    struct Ranked {
        float priority;
        std::uint32_t segment, page;
        double mass;  // as estimated, in units of 2^reference; for top_p alone
    };

    void find_row(int kv_head, int r);
    void find_reference(int kv_head, int r);
    float range(int kv_head, int r);
    PageOf most_promising(int kv_head, int r, bool middle, float least) const;
    float largest_of(int kv_head, int r, const PageOf& page, float least);
    // Of one row, the highest priorities first; empty where all pages are wanted.
    struct Best {
        std::vector<PageOf> pages;
        float least = 0;     // of their priorities
        double visible = 0;  // tokens that the row sees of them
    };

    void top_k(int kv_head);
    Best best_pages(int kv_head, int r) const;
    void score_together(int kv_head, const std::vector<Best>& best);
    float kth_score(int kv_head, int r, const Best& best) const;
    float top_p(int kv_head, int r);
    std::vector<Ranked> visible_pages(int kv_head, int r) const;
    double estimate(int kv_head, int r, std::vector<Ranked>& pages) const;
    // Moves `take` pages of the highest priorities to the front, of which `taken` lie there
    // already, adds the tokens of the others, and returns the least priority.
    float take_best(int kv_head, std::int64_t i, std::vector<Ranked>& pages, std::size_t taken,
                    std::size_t take, std::vector<std::int32_t>& tokens) const;

    Items& items_;
    Density density_;
};

}  // namespace kvdb::indexes
