// What Python cannot see: the walk over ragged blocks, and the pool when an item throws.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels/run.h"
#include "thread_pool.h"
#include "usable_cpus.h"

using namespace kvdb;

namespace {

constexpr Geometry kGeometry{Dtype::float32, 2, 8, 64, 8, false};
constexpr std::uint64_t kBase = 1 << 20;

// The run positions that a cursor yields, as slots counted over all blocks from kBase.
std::vector<std::int64_t> walk(const Run& run, std::int64_t block, std::int64_t token,
                               std::int64_t end) {
    const auto slot = [](const std::byte* row) {
        const std::uint64_t offset = reinterpret_cast<std::uint64_t>(row) - kBase;
        const std::uint64_t in_block = offset % kGeometry.block_bytes() / kGeometry.key_row_bytes();
        return static_cast<std::int64_t>(offset / kGeometry.block_bytes() * 64 + in_block);
    };
    std::vector<std::int64_t> slots;
    RunCursor cursor(kGeometry, run, block, token, end);
    for (Tile<2> tile; cursor.next(tile);) {
        CHECK(tile.begin == token + static_cast<std::int64_t>(slots.size()));
        for (int g = 0; g < tile.group_count(); ++g) {
            for (int t = 0; t < tile.tokens_in(g); ++t) {
                const std::byte* start = tile.start[g];
                slots.push_back(start ? slot(start + t * kGeometry.key_row_bytes())
                                      : slot(tile.rows[g * kGroup + t]));
            }
        }
    }
    return slots;
}

}  // namespace

TEST_CASE("a cursor yields the valid tokens of every block, in order") {
    const std::vector<std::int32_t> counts{64, 0, 17, 3, 64, 1};
    std::vector<std::uint64_t> table;
    std::vector<std::int64_t> expected;
    for (std::size_t b = 0; b < counts.size(); ++b) {
        table.push_back(kBase + b * kGeometry.block_bytes());
        for (int t = 0; t < counts[b]; ++t)
            expected.push_back(static_cast<std::int64_t>(b) * 64 + t);
    }
    const Run run{table.data(), counts.data(), 6};
    CHECK(walk(run, 0, 0, 149) == expected);
    CHECK(walk(run, 0, 0, 70) == std::vector(expected.begin(), expected.begin() + 70));
    CHECK(walk(run, 3, 81, 149) == std::vector(expected.begin() + 81, expected.end()));
    CHECK(walk(run, 6, 149, 149).empty());
}

TEST_CASE("no tile spans two views, and one that nobody sees is left out") {
    const std::vector<std::int32_t> counts{64, 20, 0, 64, 64, 64}, view{0, 0, 1, 1, -1};
    const std::vector<std::uint64_t> table{kBase, kBase, kBase, kBase, kBase, kBase};
    const std::vector<std::uint64_t> hidden{0, 1 << 3, 0, ~std::uint64_t{0}, 1};
    const Placement placement{view.data(), 5, nullptr, nullptr, 0, false, hidden.data(), 1};
    const Run run{table.data(), counts.data(), 6, &placement};
    RunCursor cursor(kGeometry, run, 0, 0, 270);
    std::vector<std::vector<std::int64_t>> seen;  // begin, count, view, hidden
    for (Tile<8> tile; cursor.next(tile);) {
        seen.push_back({tile.begin, tile.count, tile.view,
                        static_cast<std::int64_t>(tile.hidden[0]),
                        static_cast<std::int64_t>(tile.hidden[1])});
    }
    CHECK(seen ==
          std::vector<std::vector<std::int64_t>>{{0, 84, 0, 0, 1 << 3}, {148, 122, -1, 1, 0}});
}

TEST_CASE("the pool runs every item once, on slots of their own") {
    ThreadPool& pool = ThreadPool::instance();
    for (int round = 0; round < 200; ++round) {
        std::vector<std::atomic<int>> runs(100);
        std::vector<std::atomic<int>> inside(4);
        std::atomic<bool> shared{false};
        pool.run(100, 4, [&](std::int64_t item, int slot) {
            if (inside[slot]++ != 0) shared = true;
            ++runs[item];
            --inside[slot];
        });
        CHECK_FALSE(shared);
        for (const auto& count : runs) CHECK(count == 1);
    }
}

TEST_CASE("many callers and many more threads than cores: every item runs once") {
    std::vector<std::thread> callers;
    std::atomic<int> wrong{0};
    for (int caller = 0; caller < 6; ++caller) {
        callers.emplace_back([&] {
            for (int round = 0; round < 100; ++round) {
                std::vector<std::atomic<int>> runs(1 + round * 7);
                ThreadPool::instance().run(static_cast<std::int64_t>(runs.size()), 128,
                                           [&](std::int64_t item, int) { ++runs[item]; });
                for (const auto& count : runs) wrong += count != 1;
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(wrong == 0);
}

TEST_CASE("the first exception reaches the caller, and the pool goes on") {
    ThreadPool& pool = ThreadPool::instance();
    const auto fail = [](std::int64_t item, int) {
        if (item == 5) throw std::runtime_error("five");
    };
    CHECK_THROWS_WITH(pool.run(10, 4, fail), "five");
    CHECK_THROWS_WITH(pool.run(10, 1, fail), "five");
    std::atomic<int> items{0};
    pool.run(10, 4, [&](std::int64_t, int) { ++items; });
    CHECK(items == 10);
}

TEST_CASE("within a call of several threads each works alone") {
    ThreadPool& pool = ThreadPool::instance();
    std::atomic<int> done{0}, elsewhere{0};
    pool.run(8, 4, [&](std::int64_t, int) {
        const auto self = std::this_thread::get_id();
        pool.run(5, 4, [&](std::int64_t, int slot) {
            elsewhere += slot != 0 || std::this_thread::get_id() != self;
            ++done;
        });
    });
    CHECK(done == 40);
    CHECK(elsewhere == 0);
}

TEST_CASE("calls of a series wake a worker once, however long the caller is busy between them") {
    using Clock = std::chrono::steady_clock;
    if (usable_cpus() < 2) return;
    const auto busy = [](int us) {
        for (const auto end = Clock::now() + std::chrono::microseconds(us); Clock::now() < end;) {
        }
    };
    ThreadPool& pool = ThreadPool::instance();
    const auto woken = [&] {
        std::int64_t sum = 0;
        for (const ThreadPool::Counters& slot : pool.counters()) sum += slot.woken;
        return sum;
    };
    const int threads = ThreadPool::threads(), spin = ThreadPool::spin_us();
    ThreadPool::set_threads(2);
    ThreadPool::set_spin_us(5);
    const auto calls = [&] {
        const std::int64_t before = woken();
        for (int call = 0; call < 6; ++call) {
            pool.run(16, 2, [&](std::int64_t, int) { busy(20); });
            busy(100);
        }
        return woken() - before;
    };
    std::int64_t least = 100;
    for (int round = 0; round < 100; ++round) {  // others may keep a thread from working
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const ThreadPool::Series series(2);
        least = std::min(least, calls());
    }
    ThreadPool::set_threads(threads);
    ThreadPool::set_spin_us(spin);
    CHECK(least <= 1);
}
