// Computes how much a row would read. Where that is too much, pages are given less of their reach,
// or the row gets no answer.
#pragma once

#include <array>

#include "search_state.h"

namespace kvdb::indexes::coarse {

class Density {
  public:
    explicit Density(SearchState& state) : state_(state) {}

    // If a KV head would read more tokens than this, reading everything exactly costs less; +inf
    // where the head has to be answered at any cost.
    double limit() const;
    // Whether the row would read more than a head does that attends to a few tokens.
    bool excessive(int kv_head, int r) const;
    // Whether means of pages say little of what a row leaves out, because the tokens of a page
    // weigh too differently.
    bool means_mislead(int kv_head, int r) const;
    // Gives pages less of their reach as long as too much would be read: a head that attends to
    // everything a little has nothing to find. A head that may be given up is not answered by half.
    void narrow(int kv_head, int r);
    // Leaves a KV head unanswered if its rows together would read too much.
    void give_up(int kv_head);

  private:
    // The shares of a page's margin that a row may end up with.
    static constexpr std::array<float, 5> kShares{1.0f, 0.75f, 0.5f, 0.25f, 0.0f};
    using Reads = std::array<double, kShares.size()>;

    // The number of visible tokens in pages that reach the row's threshold, for each of the first
    // `shares` shares of its margin. Stops when the last of these numbers exceeds `stop`.
    Reads reads(int kv_head, int r, std::size_t shares, double stop) const;
    double reads_together(int kv_head, double stop) const;
    double most() const;

    SearchState& state_;
};

}  // namespace kvdb::indexes::coarse
