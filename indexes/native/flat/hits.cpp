#include "hits.h"

#include <algorithm>
#include <utility>

#include "thread_pool.h"

namespace kvdb::indexes {
namespace {

constexpr std::int64_t kFewHits = 1 << 14;  // gathered on one thread

}  // namespace

Hits::Hits(const Batch& batch, Thresholds& thresholds, std::int64_t items, int threads)
    : batch_(batch),
      thresholds_(thresholds),
      items_(items),
      stores_(threads),
      records_(batch.heads * items * batch.rows),
      late_records_(records_.size()) {}

void Hits::keep(const Tile& tile, std::int64_t item, bool late, const Scanner& scanner,
                int thread) {
    if (late) any_late_.store(true, std::memory_order_relaxed);
    Record* records = (late ? late_records_ : records_).data() +
                      (tile.head * items_ + item) * batch_.rows + tile.number * kTile;
    for (int r = 0; r < tile.rows; ++r) {
        if (thresholds_.dropped(tile.row(r))) continue;
        records[r].thread = thread;
        keep_row(tile, r, scanner, stores_[thread], records[r]);
    }
}

void Hits::keep_row(const Tile& tile, int r, const Scanner& scanner, Store& store, Record& record) {
    const std::int64_t row = tile.row(r), i = batch_.query_of(row);
    const std::vector<std::int32_t>& tokens = scanner.tokens();
    const float* scores = scanner.scores(r);
    float least = thresholds_.of(row), best = -INFINITY;
    record.begin = static_cast<std::int64_t>(store.ids.size());
    for (std::size_t t = 0; t < tokens.size(); ++t) {
        if (!(scores[t] >= least) || !batch_.queries.visible(i, tokens[t])) continue;
        store.ids.push_back(tokens[t]);
        store.scores.push_back(scores[t]);
        if (!thresholds_.by_rank() && scores[t] > best) {
            best = scores[t];
            thresholds_.raise(row, best);
            least = thresholds_.of(row);
        }
    }
    record.end = static_cast<std::int64_t>(store.ids.size());
    if (thresholds_.by_rank()) {
        thresholds_.rank(row, store.scores.data() + record.begin, record.end - record.begin);
    }
}

FoundRows Hits::gather(int threads) const {
    FoundRows found;
    const std::int64_t rows = batch_.heads * batch_.rows, k = thresholds_.wanted().k;
    found.offsets.assign(rows + 1, 0);
    for (std::int64_t r = 0; r < rows; ++r) {
        const float least = thresholds_.of(r);
        std::int64_t count = 0;
        each(r, [&](std::int32_t, float score) { count += score >= least; });
        if (thresholds_.by_rank()) count = std::min(count, k);
        found.offsets[r + 1] = found.offsets[r] + count;
    }
    found.ids.resize(found.offsets[rows]);
    found.scores.resize(found.offsets[rows]);
    ThreadPool::instance().run(rows, found.offsets[rows] < kFewHits ? 1 : threads,
                               [&](std::int64_t r, int) { fill(r, found); });
    return found;
}

template <class Body>
void Hits::each(std::int64_t row, Body&& body) const {
    const std::int64_t first = row / batch_.rows * items_;
    for (const std::vector<Record>* records : {&records_, &late_records_}) {
        for (std::int64_t i = 0; i < items_; ++i) {
            const Record& record = (*records)[(first + i) * batch_.rows + row % batch_.rows];
            const Store& store = stores_[record.thread];
            for (std::int64_t h = record.begin; h < record.end; ++h) {
                body(store.ids[h], store.scores[h]);
            }
        }
    }
}

void Hits::fill(std::int64_t row, FoundRows& found) const {
    const float least = thresholds_.of(row);
    const std::int64_t begin = found.offsets[row], end = found.offsets[row + 1];
    std::int32_t* ids = found.ids.data() + begin;
    float* scores = found.scores.data() + begin;
    if (!thresholds_.by_rank() && !any_late_) {
        each(row, [&](std::int32_t id, float score) {
            if (!(score >= least)) return;
            *ids++ = id;
            *scores++ = score;
        });
        return;
    }
    std::vector<std::pair<float, std::int32_t>> hits;
    each(row, [&](std::int32_t id, float score) {
        if (score >= least) hits.emplace_back(-score, id);
    });
    const auto last = hits.begin() + (end - begin);  // of equals the earlier tokens
    if (last != hits.end()) std::nth_element(hits.begin(), last, hits.end());
    std::sort(hits.begin(), last, [](auto& a, auto& b) { return a.second < b.second; });
    for (auto hit = hits.begin(); hit != last; ++hit) {
        *ids++ = hit->second;
        *scores++ = -hit->first;
    }
}

}  // namespace kvdb::indexes
