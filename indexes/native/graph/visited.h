// The tokens that a search has visited.
#pragma once

#include <cstdint>
#include <vector>

namespace kvdb::indexes::graph {

// A hash set whose clearing costs only as much as it held. A bitmap over all tokens of a long
// context would have to be read from memory for each search.
class Visited {
  public:
    void clear() {
        slots_.assign(kSlots, kFree);
        shift_ = 32 - kSlotsLog;
        count_ = 0;
    }

    // Adds a token; returns whether it was not in the set.
    bool insert(std::uint32_t token) {
        if (!place(token)) return false;
        if (2 * count_ >= slots_.size()) grow();
        return true;
    }

    // Whether the token stands in the first slot where it may; most that are in the set do.
    bool surely_holds(std::uint32_t token) const { return slots_[home(token)] == token; }

    std::size_t count() const { return count_; }

  private:
    static constexpr int kSlotsLog = 12;
    static constexpr std::size_t kSlots = std::size_t{1} << kSlotsLog;
    static constexpr std::uint32_t kFree = 0xffffffffu;  // no token: there are at most INT32_MAX

    std::size_t home(std::uint32_t token) const { return (token * 0x9e3779b1u) >> shift_; }

    bool place(std::uint32_t token) {
        const std::size_t mask = slots_.size() - 1;
        std::uint32_t* slots = slots_.data();
        for (std::size_t i = home(token);; i = (i + 1) & mask) {
            if (slots[i] == token) return false;
            if (slots[i] == kFree) {
                slots[i] = token;
                ++count_;
                return true;
            }
        }
    }

    void grow() {
        std::vector<std::uint32_t> old(2 * slots_.size(), kFree);
        old.swap(slots_);
        --shift_;
        count_ = 0;
        for (const std::uint32_t token : old) {
            if (token != kFree) place(token);
        }
    }

    std::vector<std::uint32_t> slots_;
    int shift_ = 0;
    std::size_t count_ = 0;
};

}  // namespace kvdb::indexes::graph
