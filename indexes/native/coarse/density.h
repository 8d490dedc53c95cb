// How much a row would read, and what follows where that is too much: less of the pages' reach, or
// no answer.
#pragma once

#include <array>

#include "search_state.h"

namespace kvdb::indexes::coarse {

class Density {
  public:
    explicit Density(SearchState& state) : state_(state) {}

    // Where a KV head would read more tokens than this, reading everything exactly costs less; +inf
    // where it is to be answered at any cost.
    double limit() const;
    // Whether the row would read more than a head does that attends to a few tokens.
    bool excessive(int kv_head, int r) const;
    // Gives pages less of their reach while too much would be read: a head that attends to a little
    // of everything has nothing to find. One that may be given up is not answered by half.
    void narrow(int kv_head, int r);
    // Leaves a KV head unanswered whose rows would read too much together.
    void give_up(int kv_head);

  private:
    // The shares of a page's margin that a row may be left with.
    static constexpr std::array<float, 5> kShares{1.0f, 0.75f, 0.5f, 0.25f, 0.0f};
    using Reads = std::array<double, kShares.size()>;

    // Visible tokens of the pages that reach the row's threshold, with each of the first `shares`
    // shares of its margin. Stops where the last comes to more than `stop`.
    Reads reads(int kv_head, int r, std::size_t shares, double stop) const;
    double reads_together(int kv_head, double stop) const;
    double most() const;

    SearchState& state_;
};

}  // namespace kvdb::indexes::coarse
