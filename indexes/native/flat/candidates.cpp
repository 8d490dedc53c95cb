#include "candidates.h"

#include <algorithm>
#include <utility>

#include "thread_pool.h"

namespace kvdb::indexes::flat {
namespace {

constexpr std::int64_t kFewCandidates = 1 << 14;  // gathered on one thread

}  // namespace

Candidates::Candidates(const Batch& batch, Thresholds& thresholds, std::int64_t items, int threads)
    : batch_(batch),
      thresholds_(thresholds),
      items_(items),
      stores_(threads),
      records_(batch.heads * items * batch.rows),
      late_records_(records_.size()) {}

void Candidates::add(const Tile& tile, std::int64_t item, bool late, const Scanner& scanner,
                     int thread) {
    if (late) any_late_.store(true, std::memory_order_relaxed);
    Record* records = (late ? late_records_ : records_).data() +
                      (tile.head * items_ + item) * batch_.rows + tile.number * kTile;
    for (int r = 0; r < tile.rows; ++r) {
        if (thresholds_.dropped(tile.row(r))) continue;
        records[r].thread = thread;
        add_row(tile, r, scanner, stores_[thread], records[r]);
    }
}

void Candidates::add_row(const Tile& tile, int r, const Scanner& scanner, Store& store,
                         Record& record) {
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

RetrievedRows Candidates::gather(int threads) const {
    RetrievedRows result;
    const std::int64_t rows = batch_.heads * batch_.rows, k = thresholds_.options().k;
    result.offsets.assign(rows + 1, 0);
    for (std::int64_t r = 0; r < rows; ++r) {
        const float least = thresholds_.of(r);
        std::int64_t count = 0;
        each(r, [&](std::int32_t, float score) { count += score >= least; });
        if (thresholds_.by_rank()) count = std::min(count, k);
        result.offsets[r + 1] = result.offsets[r] + count;
    }
    result.ids.resize(result.offsets[rows]);
    result.scores.resize(result.offsets[rows]);
    ThreadPool::instance().run(rows, result.offsets[rows] < kFewCandidates ? 1 : threads,
                               [&](std::int64_t r, int) { fill_row(r, result); });
    return result;
}

template <class Body>
void Candidates::each(std::int64_t row, Body&& body) const {
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

void Candidates::fill_row(std::int64_t row, RetrievedRows& result) const {
    const float least = thresholds_.of(row);
    const std::int64_t begin = result.offsets[row], end = result.offsets[row + 1];
    std::int32_t* ids = result.ids.data() + begin;
    float* scores = result.scores.data() + begin;
    if (!thresholds_.by_rank() && !any_late_) {
        each(row, [&](std::int32_t id, float score) {
            if (!(score >= least)) return;
            *ids++ = id;
            *scores++ = score;
        });
        return;
    }
    std::vector<std::pair<float, std::int32_t>> ranked;
    each(row, [&](std::int32_t id, float score) {
        if (score >= least) ranked.emplace_back(-score, id);
    });
    const auto last = ranked.begin() + (end - begin);  // of equals the earlier tokens
    if (last != ranked.end()) std::nth_element(ranked.begin(), last, ranked.end());
    std::sort(ranked.begin(), last, [](auto& a, auto& b) { return a.second < b.second; });
    for (auto next = ranked.begin(); next != last; ++next) {
        *ids++ = next->second;
        *scores++ = -next->first;
    }
}

}  // namespace kvdb::indexes::flat
