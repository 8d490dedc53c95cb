// The score from which on tokens are retrieved, and the priority from which on pages are read.
#pragma once

#include "density.h"
#include "paged_memory.h"

namespace kvdb::indexes::coarse {

class Thresholds {
  public:
    explicit Thresholds(SearchState& state) : state_(state), density_(state) {}

    // Asks for keys that `find` will score, as far as that is known before others are scored.
    void ask(int kv_head, AskedRows& asked) const;

    // Plans every row of a KV head.
    void find(int kv_head);

  private:
    struct Ranked {
        float priority, rounding;
        std::uint32_t segment, page;
        double exponent;  // of 2, what the mass of its tokens is at most
    };

    void find_row(int kv_head, int r);
    float range(int kv_head, int r);
    PageRef best_page(int kv_head, int r, bool middle, float least) const;
    float largest_of(int kv_head, int r, const PageRef& page, float least);
    // The best pages of one row, the highest priorities first; empty where all pages are read.
    struct Best {
        std::vector<PageRef> pages;
        float least = 0;     // of their priorities
        double visible = 0;  // tokens that the row sees of them
    };

    void top_k(int kv_head);
    Best best_pages(int kv_head, int r) const;
    void score_together(int kv_head, const std::vector<Best>& best);
    float kth_score(int kv_head, int r, const Best& best) const;
    void top_p(int kv_head, int r);
    std::vector<Ranked> visible_pages(int kv_head, int r) const;
    double rest(const std::vector<Ranked>& pages, std::size_t taken, double exponent,
                double stop) const;
    // Moves `take` pages of the highest priorities to the front, of which `taken` lie there
    // already, adds the tokens of the others, and returns the least that their priorities may be
    // where they are computed again.
    float select_best(int kv_head, std::int64_t i, std::vector<Ranked>& pages, std::size_t taken,
                      std::size_t take, std::vector<std::int32_t>& tokens) const;

    SearchState& state_;
    Density density_;
};

}  // namespace kvdb::indexes::coarse
