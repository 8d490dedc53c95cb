#include "tile_search.h"

#include <algorithm>
#include <cmath>

#include "../dot.h"
#include "missed_mass.h"
#include "thread_pool.h"
#include "thresholds.h"

namespace kvdb::indexes::coarse {
namespace {

// The largest error of float32 sums, relative to the lengths of query and key.
constexpr float kRounding = 1e-5f;

// The amount that the tokens of a page add to its middle if they are normally distributed: half
// their variance. The variance is known for the segment as a whole, and assumed to be proportional
// to reach squared.
double variance(const CodedQuery& query, const PageSet& set, float scale) {
    double sum = 0;
    for (int b = 0; b < kChannelBlocks; ++b) sum += double{query.blocks[b]} * set.spread[b];
    return sum * scale / 2;
}

}  // namespace

void TileSearch::run() {
    ThreadPool& pool = ThreadPool::instance();
    const int threads = pool.threads();
    read.assign(state.count(), 0);
    candidates.resize(threads);
    if (state.options.tail) tails.assign(state.count() * state.rows * state.value_dim, 0);
    const auto heads = std::int64_t(state.active.size());
    const std::int64_t count = state.active_count();
    pool.run(count, threads, [&](std::int64_t i, int) { scan(state.active_item(i)); });
    ask(heads,
        [&](std::int64_t i, AskedRows& asked) { Thresholds(state).ask(state.active[i], asked); });
    pool.run(heads, threads, [&](std::int64_t i, int) { Thresholds(state).find(state.active[i]); });
    give_up_all();
    ask(count, [&](std::int64_t i, AskedRows& asked) { ask_item(state.active_item(i), asked); });
    pool.run(count, threads, [&](std::int64_t i, int slot) {
        read_item(state.active_item(i), candidates[slot].value);
    });
}

// What lies on disk of all that the heads or items ask for is read at once, and not item by item.
template <class Ask>
void TileSearch::ask(std::int64_t count, const Ask& ask) const {
    if (count == 0) return;
    AskedRows all(state.blocks.geometry, state.blocks.table);
    if (!all.paged()) return;
    ThreadPool& pool = ThreadPool::instance();
    std::vector<AskedRows> asked(pool.threads(), all);
    pool.run(count, pool.threads(), [&](std::int64_t i, int slot) { ask(i, asked[slot]); });
    for (const AskedRows& one : asked) all.add(one);
    all.bring();
}

void TileSearch::ask_item(std::int64_t number, AskedRows& asked) const {
    thread_local PageReader reader;
    reader.ask(state, state.at(number), asked);
}

// If most KV heads are read whole, reading the few others too costs less than searching for them.
void TileSearch::give_up_all() {
    const auto dense = std::count(state.dense.begin(), state.dense.end(), 1);
    if (2 * dense <= std::int64_t(state.active.size())) return;
    for (const int head : state.active) state.dense[head] = 1;
}

std::vector<ScanRow> TileSearch::scan_rows(const SegmentHead& item) const {
    const Tile::View& view = item.view;
    const float norm = *item.set.norm;
    const auto shift_norm = static_cast<float>(length(item.set.shift, state.head_dim));
    std::vector<ScanRow> rows(state.rows);
    for (int r = 0; r < state.rows; ++r) {
        const CodedQuery& query = state.tile.query(item.kv_head, r);
        rows[r] = {query.center,
                   query.center,
                   query.length,
                   static_cast<float>(dot(query.q, item.set.shift, state.head_dim)),
                   query.error * norm + kRounding * query.norm * (norm + shift_norm),
                   state.counts(view, r),
                   view.middle(r),
                   view.reach(r),
                   view.priority_ ? view.priority_ + r * view.pages : nullptr,
                   view.best(r)};
        std::fill_n(rows[r].most, 2 * kPageGroup, -std::numeric_limits<float>::infinity());
    }
    return rows;
}

void TileSearch::scan(std::int64_t number) {
    const SegmentHead item = state.at(number);
    const Tile::View& view = item.view;
    std::vector<double> tokens;
    for (std::int64_t i = 0; i < state.tile.n; ++i) {
        float* counts = view.counts + i * view.pages;
        item.visible.count(state.tile.i0 + i, item.set, view.pages, counts);
        std::int64_t seen = 0;
        for (std::int64_t p = 0; p < view.pages; ++p) seen += static_cast<std::int32_t>(counts[p]);
        tokens.push_back(double(seen));
    }
    std::vector<ScanRow> rows = scan_rows(item);
    coarse_kernels().scan(
        {{item.set.center, item.set.center_scales, item.segment.pages->center_dims()},
         {item.set.farthest, item.set.farthest_scales, state.head_dim},
         {item.set.radius, item.set.radius_scales, kChannelBlocks},
         state.options.margin,
         view.pages / kPageGroup,
         rows.data(),
         state.rows});
    for (int r = 0; r < state.rows; ++r) {
        const float* most = rows[r].most;
        RowSums& sum = state.sum(item, r);
        sum.top = *std::max_element(most, most + kPageGroup) +
                  *std::max_element(most + kPageGroup, most + 2 * kPageGroup);
        double squares = 0;
        for (const float square : rows[r].squares) squares += square;
        const CodedQuery& query = state.tile.query(item.kv_head, r);
        const double around = variance(query, item.set, state.options.scale);
        const auto curve = static_cast<float>(around * tokens[r % state.tile.n] / squares);
        sum.spread = 2 * state.options.scale * around;
        sum.curve = std::isfinite(curve) ? curve : 0.0f;  // no squares, or more than a float holds
    }
}

void TileSearch::read_item(std::int64_t number, std::vector<Candidate>& out) {
    thread_local PageReader reader;
    thread_local MissedMass missed_mass;
    const SegmentHead item = state.at(number);
    read[number] = reader.read(state, item, out);
    missed_mass.add_unread(state, item, reader.pages, reader.page_weights);
    if (state.options.tail) {
        missed_mass.add_tail(state, item, reader.page_weights,
                             tails.data() + number * state.rows * state.value_dim);
    }
}

}  // namespace kvdb::indexes::coarse
