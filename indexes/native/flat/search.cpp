#include <algorithm>
#include <cmath>

#include "batch.h"
#include "candidates.h"
#include "density.h"
#include "flat.h"
#include "sample.h"
#include "scanner.h"
#include "thread_pool.h"
#include "thresholds.h"

namespace kvdb::indexes::flat {
namespace {

constexpr int kSpan = 8;                   // chunks of an item
constexpr std::int64_t kSmallWork = 1024;  // rows times tokens, searched by one thread

int threads_for(const Batch& batch) {
    if (batch.chunks == 0) return 1;
    const auto heads = static_cast<std::int64_t>(batch.active.size());
    const std::int64_t work = (batch.end - batch.begin) * heads * batch.rows;
    return work < kSmallWork ? 1 : ThreadPool::instance().threads();
}

// One search: its items run on several threads.
class Search {
  public:
    Search(const Blocks& blocks, const FlatCodes& codes, const QueryRows& queries,
           const FlatOptions& options, float scale)
        : batch_(blocks, codes, queries),
          scale_(scale),
          threads_(threads_for(batch_)),
          spans_((batch_.chunks + kSpan - 1) / kSpan),
          thresholds_(options, batch_.heads * batch_.rows, queries.floor),
          scanners_(threads_, Scanner(batch_, thresholds_)),
          sample_(batch_),
          density_(batch_, thresholds_, threads_, scale),
          candidates_(batch_, thresholds_, spans_, threads_),
          deferred_(batch_.heads * spans_ * batch_.tiles) {}

    FlatResult run(bool give_up) {
        if (batch_.chunks > 0) {
            each_tile([&](int head, std::int64_t number, int thread) {
                batch_.prepare(head, number);
                const Tile tile = batch_.tile(head, number);
                sample_.score_sample(tile, scanners_[thread], thresholds_);
                if (give_up) density_.drop_dense(tile, scanners_[thread], thread);
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
                body(batch_.active[item / batch_.tiles], item % batch_.tiles, thread);
            });
    }

    void each_span(bool late) {
        ThreadPool::instance().run(heads() * spans_, threads_, [&](std::int64_t item, int thread) {
            for (std::int64_t t = 0; t < batch_.tiles; ++t) {
                const Tile tile = batch_.tile(batch_.active[item / spans_], t);
                if (late && !deferred(tile, item % spans_)) continue;
                if (!all_dropped(tile)) span(tile, item % spans_, late, thread);
            }
        });
    }

    std::int64_t heads() const { return static_cast<std::int64_t>(batch_.active.size()); }

    std::uint8_t& deferred(const Tile& tile, std::int64_t span) {
        return deferred_[(tile.head * spans_ + span) * batch_.tiles + tile.number];
    }

    bool all_dropped(const Tile& tile) const {
        bool all = true;
        for (int r = 0; r < tile.rows; ++r) all = all && thresholds_.dropped(tile.row(r));
        return all;
    }

    // Adds the candidates of one span of chunks for a tile. late: only those in chunks that were
    // put off before.
    void span(const Tile& tile, std::int64_t number, bool late, int thread) {
        Scanner& scanner = scanners_[thread];
        std::uint8_t& deferred = this->deferred(tile, number);
        scanner.start();
        for (int c = 0; c < kSpan; ++c) {
            const std::int64_t chunk = number * kSpan + c;
            if (chunk >= batch_.chunks || (late && !(deferred >> c & 1))) continue;
            if (chunk + 1 < batch_.chunks) {
                scanner.prefetch(batch_.at(tile, batch_.first_chunk + chunk + 1));
            }
            if (!scanner.scan(tile, batch_.first_chunk + chunk, !late)) {
                deferred |= static_cast<std::uint8_t>(1 << c);
                any_deferred_.store(true, std::memory_order_relaxed);
            }
        }
        scanner.finish(tile);
        if (!scanner.tokens().empty()) candidates_.add(tile, number, late, scanner, thread);
    }

    FlatResult gather() const {
        FlatResult result;
        result.retrieved = candidates_.gather(threads_);
        const std::int64_t rows = batch_.heads * batch_.rows;
        for (std::int64_t r = 0; r < rows; ++r) {
            if (!batch_.queries.is_active(static_cast<int>(r / batch_.rows))) {
                result.dense.push_back(0);
                result.caps.push_back(INFINITY);
                result.missed.push_back(-INFINITY);
                result.bound.push_back(-INFINITY);
                continue;
            }
            result.dense.push_back(thresholds_.dropped(r));
            result.caps.push_back(thresholds_.of(r));
            add_missed_mass(r, result);
        }
        result.scanned = heads() * std::max<std::int64_t>(batch_.end - batch_.begin, 0);
        for (const Scanner& scanner : scanners_) result.nbytes += scanner.nbytes();
        return result;
    }

    // Adds the mass that the row missed: no missed token exceeds the threshold, and the sample
    // gives their mean.
    void add_missed_mass(std::int64_t row, FlatResult& result) const {
        const float least = thresholds_.of(row);
        const std::int64_t left =
            batch_.visible[batch_.query_of(row)] -
            (result.retrieved.offsets[row + 1] - result.retrieved.offsets[row]);
        float bound = -INFINITY, missed = -INFINITY;
        if (left > 0) {
            const double cap = double{scale_} * least, more = std::log(static_cast<double>(left));
            bound = missed = INFINITY;
            if (thresholds_.dropped(row)) {
                bound = density_.bound(row);
            } else if (std::isfinite(cap)) {
                bound = std::nextafter(static_cast<float>(cap + more + 1e-5), INFINITY);
            }
            if (std::isfinite(bound)) {
                const double usual = sample_.log_mean(row, scale_, least) + more;
                // If the whole sample lies above the threshold, there is only the bound.
                missed = std::isfinite(usual) ? std::min(bound, static_cast<float>(usual)) : bound;
            }
        }
        result.bound.push_back(bound);
        result.missed.push_back(missed);
    }

    Batch batch_;
    const float scale_;
    const int threads_;
    const std::int64_t spans_;
    Thresholds thresholds_;
    std::vector<Scanner> scanners_;  // of each thread
    Sample sample_;
    Density density_;
    Candidates candidates_;
    std::vector<std::uint8_t> deferred_;  // [heads][spans][tiles] a bit for each chunk
    std::atomic<bool> any_deferred_{false};
};

}  // namespace

FlatResult search(const Blocks& blocks, const FlatCodes& codes, const QueryRows& queries,
                  const FlatOptions& options, float scale) {
    return Search(blocks, codes, queries, options, scale).run(options.give_up);
}

}  // namespace kvdb::indexes::flat
