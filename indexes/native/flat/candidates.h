// The tokens that reached a threshold while it could still rise; the result is those that reach the
// final one.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"
#include "cache_line.h"
#include "scanner.h"
#include "thresholds.h"

namespace kvdb::indexes::flat {

class Candidates {
  public:
    // Each item of a head looks at chunks behind those of the item before it.
    Candidates(const Batch& batch, Thresholds& thresholds, std::int64_t items, int threads);

    // Adds the scored tokens of an item that reach their rows' thresholds, and raises these. late:
    // in the second scan of the item.
    void add(const Tile& tile, std::int64_t item, bool late, const Scanner& scanner, int thread);

    // The candidates of each row that reach its final threshold.
    RetrievedRows gather(int threads) const;

  private:
    struct Record {  // candidates of one row in one item
        std::int32_t thread = 0;
        std::int64_t begin = 0, end = 0;
    };
    struct alignas(kApart) Store {  // of one thread
        std::vector<std::int32_t> ids;
        std::vector<float> scores;
    };

    void add_row(const Tile& tile, int r, const Scanner& scanner, Store& store, Record& record);
    template <class Body>
    void each(std::int64_t row, Body&& body) const;
    void fill_row(std::int64_t row, RetrievedRows& result) const;

    const Batch& batch_;
    Thresholds& thresholds_;
    const std::int64_t items_;
    std::vector<Store> stores_;
    std::vector<Record> records_, late_records_;  // [heads][items][rows]; late: or none
    std::atomic<bool> any_late_{false};
};

}  // namespace kvdb::indexes::flat
