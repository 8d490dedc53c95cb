#include "search.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "rest.h"
#include "select.h"
#include "thread_pool.h"
#include "tile.h"

namespace kvdb::indexes::quantized {
namespace {

constexpr std::int64_t kRowsTogether = 16;  // of a KV head, whose reads are shared
// A KV head of which a row wants a larger share of the tokens is given up, unless there are few.
constexpr double kWorth = 0.25;
constexpr std::int64_t kLeast = 4096;

// Whether a row may want so many tokens that its KV head is given up.
bool may_give_up(const Tile& tile) {
    const SearchOptions& options = tile.options;
    if (!options.give_up || tile.blocks.tokens < kLeast) return false;
    if (tile.exact || options.margin > 0 || options.retrieval != SearchOptions::Retrieval::top_k) {
        return true;
    }
    const auto wants_many = [&](const Row& row) {  // of k candidates at most
        return options.parameter > kWorth * double(tile.visible(row.i));
    };
    return std::any_of(tile.rows.begin(), tile.rows.begin() + tile.each, wants_many);
}

// Retrieves what the rows ask for. Returns how many keys were read.
std::int64_t retrieve(Tile& tile) {
    std::atomic<std::int64_t> read{0};
    ThreadPool& pool = ThreadPool::instance();
    std::vector<std::vector<std::int32_t>> candidates(tile.rows.size());
    const auto rows = static_cast<std::int64_t>(tile.rows.size());
    const int threads = tile.blocks.tokens * rows < 16384 ? 1 : pool.threads();
    const bool give_up = may_give_up(tile);
    const auto find = [&](std::int64_t i) {
        candidates[i] = Select(tile, i / tile.each, static_cast<int>(i % tile.each)).candidates();
    };
    const auto keep = [&](std::int64_t i) {
        Select(tile, i / tile.each, static_cast<int>(i % tile.each)).keep(candidates[i]);
        read += static_cast<std::int64_t>(candidates[i].size());
    };
    if (!give_up) {
        pool.run(rows, threads, [&](std::int64_t i, int) {
            find(i);
            keep(i);
        });
        return read;
    }
    pool.run(rows, threads, [&](std::int64_t i, int) {
        find(i);
        const auto count = static_cast<double>(candidates[i].size());
        tile.rows[i].dense = count > kWorth * double(tile.visible(tile.rows[i].i));
    });
    for (std::int64_t head = 0; head < static_cast<std::int64_t>(tile.heads.size()); ++head) {
        bool dense = false;
        for (int r = 0; r < tile.each; ++r) dense = dense || tile.row(head, r).dense;
        for (int r = 0; r < tile.each; ++r) tile.row(head, r).dense = dense;
    }
    pool.run(rows, threads, [&](std::int64_t i, int) {
        if (!tile.rows[i].dense) keep(i);
    });
    return read;
}

void gather(const std::vector<Row>& rows, std::int64_t count, SearchResult& out) {
    std::vector<const Row*> by_number(count);
    for (const Row& row : rows) by_number[row.number] = &row;
    const std::vector<std::int32_t> no_ids;
    const std::vector<float> no_scores;
    for (const Row* row : by_number) {
        out.retrieved.append(row ? row->ids : no_ids, row ? row->scores : no_scores);
    }
}

// The sums over what a tile's rows did not retrieve.
void finish(Tile& tile, SearchResult& out) {
    Rest rest(tile);
    rest.run();
    const int d = tile.codes.head_dim;
    const auto rows = static_cast<std::int64_t>(tile.rows.size());
    ThreadPool& pool = ThreadPool::instance();
    pool.run(rows, tile.chunks * rows < 64 ? 1 : pool.threads(), [&](std::int64_t i, int) {
        const Row& row = tile.rows[i];
        const std::int64_t head = i / tile.each;
        const int r = static_cast<int>(i % tile.each);
        out.set_missed(row.number, rest.missed(head, r), rest.bound(head, r));
        out.dense[row.number] = row.dense;
        if (tile.options.tail) rest.tail(head, r, out.tail.data() + row.number * d);
    });
}

}  // namespace

SearchResult search(const Blocks& blocks, const Codes& codes, const QueryRows& queries,
                    const SearchOptions& options) {
    const std::int64_t count = queries.rows() * blocks.geometry.kv_heads;
    const int d = codes.head_dim;
    SearchResult out;
    out.resize(count, options.tail ? d : 0);
    std::vector<Row> rows;
    const std::int64_t each = std::max<std::int64_t>(1, kRowsTogether / queries.group);
    for (std::int64_t i = 0; i < queries.n; i += each) {
        Tile tile(blocks, codes, queries, options, i, std::min(each, queries.n - i));
        tile.scan();
        const std::int64_t read = retrieve(tile);
        finish(tile, out);
        const auto scanned = static_cast<std::int64_t>(tile.heads.size()) * blocks.tokens;
        const auto key_bytes = static_cast<std::int64_t>(blocks.geometry.key_row_bytes());
        const std::int64_t coded = d / 2 + 2 + (options.tail ? Codes::value_dims(d) / 2 + 2 : 0);
        out.scanned += scanned;
        out.nbytes += scanned * (tile.exact ? key_bytes + coded - d / 2 - 2 : coded);
        out.nbytes += tile.exact ? 0 : read * key_bytes;
        for (Row& row : tile.rows) rows.push_back(std::move(row));
    }
    gather(rows, count, out);
    return out;
}

}  // namespace kvdb::indexes::quantized
