#include "pass.h"

#include <algorithm>
#include <cmath>

#include "thread_pool.h"
#include "thresholds.h"
#include "weighing.h"

namespace kvdb::indexes {
namespace {

// What float32 sums may be wrong by, relative to the lengths of query and key.
constexpr float kRounding = 1e-5f;

// Sums in eight lanes, in double.
double dot(const float* x, const float* y, int n) {
    double sums[8] = {};
    for (int i = 0; i < n; i += 8) {
        for (int j = 0; j < 8; ++j) sums[j] += double{x[i + j]} * y[i + j];
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// What the tokens of a page add to its middle, were they spread like a normal distribution: half
// their variance. It is known for the segment as a whole, and taken to go with reach squared.
double variance(const CodedQuery& query, const PageSet& set, float scale) {
    double sum = 0;
    for (int b = 0; b < kChannelBlocks; ++b) sum += double{query.blocks[b]} * set.spread[b];
    return sum * scale / 2;
}

}  // namespace

void Pass::run() {
    ThreadPool& pool = ThreadPool::instance();
    const int threads = pool.threads();
    read.assign(items.count(), 0);
    hits.resize(threads);
    if (items.options.tail) tails.assign(items.count() * items.rows * items.head_dim, 0);
    const auto heads = std::int64_t(items.asked.size());
    const std::int64_t count = items.asked_count();
    pool.run(count, threads, [&](std::int64_t i, int) { scan(items.asked_item(i)); });
    pool.run(heads, threads, [&](std::int64_t i, int) { Thresholds(items).find(items.asked[i]); });
    give_up_all();
    pool.run(count, threads,
             [&](std::int64_t i, int slot) { read_item(items.asked_item(i), hits[slot]); });
}

// Where most KV heads are read whole the few others cost little more, less than a search.
void Pass::give_up_all() {
    const auto dense = std::count(items.dense.begin(), items.dense.end(), 1);
    if (2 * dense <= std::int64_t(items.asked.size())) return;
    for (const int head : items.asked) items.dense[head] = 1;
}

std::vector<ScanRow> Pass::scan_rows(const Item& item) const {
    const Tile::View& view = item.view;
    const float norm = *item.set.norm;
    const auto shift_norm =
        static_cast<float>(std::sqrt(dot(item.set.shift, item.set.shift, items.head_dim)));
    std::vector<ScanRow> rows(items.rows);
    for (int r = 0; r < items.rows; ++r) {
        const CodedQuery& query = items.tile.query(item.kv_head, r);
        rows[r] = {query.center,
                   query.center,
                   query.length,
                   static_cast<float>(dot(query.q, item.set.shift, items.head_dim)),
                   query.error * norm + kRounding * query.norm * (norm + shift_norm),
                   items.counts(view, r),
                   view.middle(r),
                   view.reach(r),
                   view.priority_ ? view.priority_ + r * view.pages : nullptr,
                   view.best(r)};
        std::fill_n(rows[r].most, 2 * kPageGroup, -std::numeric_limits<float>::infinity());
    }
    return rows;
}

void Pass::scan(std::int64_t number) {
    const Item item = items.at(number);
    const Tile::View& view = item.view;
    std::vector<double> tokens;
    for (std::int64_t i = 0; i < items.tile.n; ++i) {
        float* counts = view.counts + i * view.pages;
        item.visible.count(items.tile.i0 + i, item.set, view.pages, counts);
        std::int64_t seen = 0;
        for (std::int64_t p = 0; p < view.pages; ++p) seen += static_cast<std::int32_t>(counts[p]);
        tokens.push_back(double(seen));
    }
    std::vector<ScanRow> rows = scan_rows(item);
    coarse_kernels().scan(
        {{item.set.center, item.set.center_scales, item.segment.pages->center_dims()},
         {item.set.farthest, item.set.farthest_scales, items.head_dim},
         {item.set.radius, item.set.radius_scales, kChannelBlocks},
         items.options.margin,
         view.pages / kPageGroup,
         rows.data(),
         items.rows});
    for (int r = 0; r < items.rows; ++r) {
        const float* most = rows[r].most;
        RowSums& sum = items.sum(item, r);
        sum.top = *std::max_element(most, most + kPageGroup) +
                  *std::max_element(most + kPageGroup, most + 2 * kPageGroup);
        double squares = 0;
        for (const float square : rows[r].squares) squares += square;
        const CodedQuery& query = items.tile.query(item.kv_head, r);
        const double around = variance(query, item.set, items.options.scale);
        sum.curve =
            squares > 0 ? static_cast<float>(around * tokens[r % items.tile.n] / squares) : 0.0f;
    }
}

void Pass::read_item(std::int64_t number, std::vector<Hit>& out) {
    thread_local Reading reading;
    thread_local Weighing weighing;
    const Item item = items.at(number);
    read[number] = reading.read(items, item, out);
    weighing.weigh(items, item, reading.pages, reading.page_weights);
    if (items.options.tail) {
        weighing.weigh_values(items, item, reading.page_weights,
                              tails.data() + number * items.rows * items.head_dim);
    }
}

}  // namespace kvdb::indexes
