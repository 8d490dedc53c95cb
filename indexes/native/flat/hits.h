// What is found while thresholds still rise, and what of it stays when they are final.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"
#include "scanner.h"
#include "thresholds.h"

namespace kvdb::indexes {

class Hits {
  public:
    // Each item of a head looks at chunks behind those of the item before it.
    Hits(const Batch& batch, Thresholds& thresholds, std::int64_t items, int threads);

    // Takes in the scored tokens of an item that a tile's rows want, and raises their thresholds.
    // late: in the second look at the item.
    void keep(const Tile& tile, std::int64_t item, bool late, const Scanner& scanner, int thread);

    // Of each row those that its threshold leaves.
    FoundRows gather(int threads) const;

  private:
    struct Record {  // hits of one row in one item
        std::int32_t thread = 0;
        std::int64_t begin = 0, end = 0;
    };
    struct Store {  // of one thread
        std::vector<std::int32_t> ids;
        std::vector<float> scores;
    };

    void keep_row(const Tile& tile, int r, const Scanner& scanner, Store& store, Record& record);
    template <class Body>
    void each(std::int64_t row, Body&& body) const;
    void fill(std::int64_t row, FoundRows& found) const;

    const Batch& batch_;
    Thresholds& thresholds_;
    const std::int64_t items_;
    std::vector<Store> stores_;
    std::vector<Record> records_, late_records_;  // [heads][items][rows]; late: or none
    std::atomic<bool> any_late_{false};
};

}  // namespace kvdb::indexes
