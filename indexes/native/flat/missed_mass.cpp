#include <algorithm>
#include <cmath>
#include <mutex>

#include "flat.h"
#include "thread_pool.h"

namespace kvdb::indexes::flat {
namespace {

// More than the relative error of float32 in sums of a chunk's exponentials.
constexpr double kMassRounding = 1e-3;

// Clears the bits of a row's retrieved tokens.
void clear_retrieved(const std::int32_t* ids, const std::int32_t* end, std::int64_t chunk,
                     std::uint64_t* bits) {
    const std::int64_t first = chunk * kChunk;
    for (ids = std::lower_bound(ids, end, first); ids != end && *ids < first + kChunk; ++ids) {
        const std::int64_t key = *ids - first;
        if (key >= 0) bits[key / 64] &= ~(1ull << key % 64);
    }
}

}  // namespace

void missed_mass(const Blocks& blocks, const FlatCodes& codes, const QueryRows& queries,
                 const std::int64_t* offsets, const std::int32_t* ids, const float* caps,
                 float scale, float* missed, float* bound) {
    const std::int64_t heads = blocks.geometry.kv_heads, rows = queries.rows();
    const std::int64_t tiles = (rows + kTile - 1) / kTile;
    const std::int64_t chunks = chunks_of(blocks.tokens);
    std::vector<FlatTile> made(heads * tiles);
    for (std::int64_t t = 0; t < heads * tiles; ++t) {
        const int head = static_cast<int>(t / tiles);
        if (queries.is_active(head)) made[t] = make_tile(queries, codes.head_dim, head, t % tiles);
    }
    std::vector<double> estimates(heads * rows), bounds(heads * rows);
    std::vector<std::mutex> locks(heads);
    ThreadPool& pool = ThreadPool::instance();
    const int threads = blocks.tokens * heads * rows < 4096 ? 1 : pool.threads();
    pool.run(heads * chunks, threads, [&](std::int64_t item, int) {
        const std::int64_t chunk = item % chunks;
        const int head = static_cast<int>(item / chunks);
        if (!queries.is_active(head)) return;
        for (std::int64_t t = 0; t < tiles; ++t) {
            const auto count = static_cast<int>(std::min<std::int64_t>(kTile, rows - t * kTile));
            FlatMass mass{};
            std::int64_t keys = 0;
            std::int64_t left[kTile] = {};
            for (int r = 0; r < count; ++r) {
                const std::int64_t row = head * rows + t * kTile + r;
                if (caps[row] == INFINITY) continue;
                visible_bits(queries, (t * kTile + r) % queries.n, chunk, mass.keys[r]);
                clear_retrieved(ids + offsets[row], ids + offsets[row + 1], chunk, mass.keys[r]);
                for (const std::uint64_t word : mass.keys[r]) left[r] += __builtin_popcountll(word);
                mass.cap[r] = caps[row];
                keys += left[r];
            }
            if (keys == 0) continue;
            mass.scan = make_scan(codes, made[head * tiles + t], codes.at(chunk, head));
            mass.scale = scale;
            flat_kernels().mass(mass);
            const std::lock_guard lock(locks[head]);
            for (int r = 0; r < count; ++r) {
                estimates[head * rows + t * kTile + r] += mass.estimate[r];
                // Terms below the smallest normal number count as that number.
                bounds[head * rows + t * kTile + r] +=
                    mass.bound[r] * (1 + kMassRounding) + static_cast<double>(left[r]) * 0x1p-126;
            }
        }
    });
    for (std::int64_t row = 0; row < heads * rows; ++row) {
        if (caps[row] == INFINITY) continue;
        const double cap = double{scale} * caps[row];
        missed[row] = bound[row] = -INFINITY;
        if (bounds[row] == 0) continue;
        if (!std::isfinite(cap) || !std::isfinite(bounds[row])) {
            missed[row] = bound[row] = INFINITY;
            continue;
        }
        bound[row] = std::nextafter(static_cast<float>(cap + std::log(bounds[row])), INFINITY);
        missed[row] = bound[row];
        if (estimates[row] == 0) continue;  // less than float32 holds
        missed[row] = std::min(bound[row], static_cast<float>(cap + std::log(estimates[row])));
    }
}

}  // namespace kvdb::indexes::flat
