// How much a row would read, and what follows where that is too much: less of the pages' reach, or
// no answer.
#pragma once

#include <array>

#include "items.h"

namespace kvdb::indexes {

class Density {
  public:
    explicit Density(Items& items) : items_(items) {}

    // Tokens in pages that hold so many cost as much to find as to read everything exactly; +inf
    // where the row is to be answered at any cost.
    double limit(int r) const;
    // Whether the row would read more than is worth it for a head that attends to a few tokens.
    bool excessive(int kv_head, int r) const;
    // Gives pages less of their reach while too much would be read: a head that attends to a little
    // of everything has nothing to find.
    void narrow(int kv_head, int r);
    // Leaves rows unanswered that would read too much, each for itself or all of them together.
    void give_up(int kv_head);

  private:
    // Of a page's margin, what a row may still give it.
    static constexpr std::array<float, 5> kShares{1.0f, 0.75f, 0.5f, 0.25f, 0.0f};
    using Reads = std::array<double, kShares.size()>;

    // Visible tokens of the pages that reach the row's threshold, with each of the first `shares`
    // shares of its margin. Stops where the last comes to more than `stop`.
    Reads reads(int kv_head, int r, std::size_t shares, double stop) const;
    double reads_together(int kv_head) const;
    double most() const;

    Items& items_;
};

}  // namespace kvdb::indexes
