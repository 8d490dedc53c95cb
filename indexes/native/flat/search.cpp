#include <algorithm>
#include <cmath>

#include "batch.h"
#include "demand.h"
#include "flat.h"
#include "hits.h"
#include "sample.h"
#include "scanner.h"
#include "thread_pool.h"
#include "thresholds.h"

namespace kvdb::indexes {
namespace {

constexpr int kSpan = 8;                   // chunks of an item
constexpr std::int64_t kSmallWork = 1024;  // rows times tokens, searched by one thread

int threads_for(const Batch& batch) {
    if (batch.chunks == 0) return 1;
    const auto heads = static_cast<std::int64_t>(batch.asked.size());
    const std::int64_t work = (batch.end - batch.begin) * heads * batch.rows;
    return work < kSmallWork ? 1 : ThreadPool::instance().threads();
}

// One search: its items run on several threads.
class Search {
  public:
    Search(const Blocks& blocks, const FlatCodes& codes, const QueryRows& queries,
           const FlatWanted& wanted, float scale)
        : batch_(blocks, codes, queries),
          scale_(scale),
          threads_(threads_for(batch_)),
          spans_((batch_.chunks + kSpan - 1) / kSpan),
          thresholds_(wanted, batch_.heads * batch_.rows, queries.floor),
          scanners_(threads_, Scanner(batch_, thresholds_)),
          sample_(batch_),
          demand_(batch_, thresholds_, threads_, scale),
          hits_(batch_, thresholds_, spans_, threads_),
          deferred_(batch_.heads * spans_ * batch_.tiles) {}

    FlatFound run(bool give_up) {
        if (batch_.chunks > 0) {
            each_tile([&](int head, std::int64_t number, int thread) {
                batch_.prepare(head, number);
                const Tile tile = batch_.tile(head, number);
                sample_.draw(tile, scanners_[thread], thresholds_);
                if (give_up) demand_.judge(tile, scanners_[thread], thread);
            });
            each_span(false);
            if (any_deferred_) each_span(true);
        }
        return gather();
    }

  private:
    template <class Body>
    void each_tile(Body&& body) {
        ThreadPool::instance().run(
            heads() * batch_.tiles, threads_, [&](std::int64_t item, int thread) {
                body(batch_.asked[item / batch_.tiles], item % batch_.tiles, thread);
            });
    }

    void each_span(bool late) {
        ThreadPool::instance().run(heads() * spans_, threads_, [&](std::int64_t item, int thread) {
            for (std::int64_t t = 0; t < batch_.tiles; ++t) {
                const Tile tile = batch_.tile(batch_.asked[item / spans_], t);
                if (late && !deferred(tile, item % spans_)) continue;
                if (!all_dropped(tile)) span(tile, item % spans_, late, thread);
            }
        });
    }

    std::int64_t heads() const { return static_cast<std::int64_t>(batch_.asked.size()); }

    std::uint8_t& deferred(const Tile& tile, std::int64_t span) {
        return deferred_[(tile.head * spans_ + span) * batch_.tiles + tile.number];
    }

    bool all_dropped(const Tile& tile) const {
        bool all = true;
        for (int r = 0; r < tile.rows; ++r) all = all && thresholds_.dropped(tile.row(r));
        return all;
    }

    // The tokens of some chunks that the rows of a tile want. late: of those put off before.
    void span(const Tile& tile, std::int64_t number, bool late, int thread) {
        Scanner& scanner = scanners_[thread];
        std::uint8_t& deferred = this->deferred(tile, number);
        scanner.start();
        for (int c = 0; c < kSpan; ++c) {
            const std::int64_t chunk = number * kSpan + c;
            if (chunk >= batch_.chunks || (late && !(deferred >> c & 1))) continue;
            if (chunk + 1 < batch_.chunks) {
                scanner.bring(batch_.at(tile, batch_.first_chunk + chunk + 1));
            }
            if (!scanner.look(tile, batch_.first_chunk + chunk, !late)) {
                deferred |= static_cast<std::uint8_t>(1 << c);
                any_deferred_.store(true, std::memory_order_relaxed);
            }
        }
        scanner.finish(tile);
        if (!scanner.tokens().empty()) hits_.keep(tile, number, late, scanner, thread);
    }

    FlatFound gather() const {
        FlatFound found;
        found.rows = hits_.gather(threads_);
        const std::int64_t rows = batch_.heads * batch_.rows;
        for (std::int64_t r = 0; r < rows; ++r) {
            if (!batch_.queries.is_asked(static_cast<int>(r / batch_.rows))) {
                found.dense.push_back(0);
                found.caps.push_back(INFINITY);
                found.missed.push_back(-INFINITY);
                found.bound.push_back(-INFINITY);
                continue;
            }
            found.dense.push_back(thresholds_.dropped(r));
            found.caps.push_back(thresholds_.of(r));
            weigh(r, found);
        }
        found.passed.assign(5, 0);
        found.passed[4] = std::max<std::int64_t>(batch_.end - batch_.begin, 0);
        for (const Scanner& scanner : scanners_) {
            found.passed[0] += scanner.tally().by_length;
            found.passed[1] += scanner.tally().by_code;
            found.passed[2] += scanner.tally().scored;
            found.passed[3] += scanner.tally().nbytes;
        }
        return found;
    }

    // What the row missed: nothing exceeds the threshold, and the sample says what is usual.
    void weigh(std::int64_t row, FlatFound& found) const {
        const float least = thresholds_.of(row);
        const std::int64_t left = batch_.visible[batch_.query_of(row)] -
                                  (found.rows.offsets[row + 1] - found.rows.offsets[row]);
        float bound = -INFINITY, missed = -INFINITY;
        if (left > 0) {
            const double cap = double{scale_} * least, more = std::log(static_cast<double>(left));
            bound = missed = INFINITY;
            if (thresholds_.dropped(row)) {
                bound = demand_.bound(row);
            } else if (std::isfinite(cap)) {
                bound = std::nextafter(static_cast<float>(cap + more + 1e-5), INFINITY);
            }
            if (std::isfinite(bound)) {
                const double usual = sample_.log_mean(row, scale_, least) + more;
                missed = std::min(bound, static_cast<float>(usual));
            }
        }
        found.bound.push_back(bound);
        found.missed.push_back(missed);
    }

    Batch batch_;
    const float scale_;
    const int threads_;
    const std::int64_t spans_;
    Thresholds thresholds_;
    std::vector<Scanner> scanners_;  // of each thread
    Sample sample_;
    Demand demand_;
    Hits hits_;
    std::vector<std::uint8_t> deferred_;  // [heads][spans][tiles] a bit for each chunk
    std::atomic<bool> any_deferred_{false};
};

}  // namespace

FlatFound flat_search(const Blocks& blocks, const FlatCodes& codes, const QueryRows& queries,
                      const FlatWanted& wanted, float scale) {
    return Search(blocks, codes, queries, wanted, scale).run(wanted.give_up);
}

}  // namespace kvdb::indexes
