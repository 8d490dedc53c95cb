#include "rest.h"

#include <algorithm>
#include <cmath>

#include "../rotate.h"
#include "../score/kernels.h"
#include "thread_pool.h"

namespace kvdb::indexes::quantized {
namespace {

constexpr double kLn2 = 0.6931471805599453;
constexpr float kLeftOut = 0.02f;
constexpr float kFaint = 1e-18f;  // float32 holds what is as much smaller yet

}  // namespace

Rest::Rest(Tile& tile)
    : tile_(tile),
      dims_(Codes::value_dims(tile.codes.head_dim)),
      factor_(tile.options.scale * kLog2E),
      sums_(tile.rows.size() * tile.chunks) {
    if (!tile.options.tail) return;
    thread_local Scratch scratch;
    const std::size_t count = sums_.size() * (dims_ + tile.codes.head_dim);
    values_ = scratch.reserve(count);
    std::fill_n(values_, count, 0.0f);
}

void Rest::run() {
    ThreadPool& pool = ThreadPool::instance();
    const auto items = static_cast<std::int64_t>(tile_.heads.size()) * tile_.chunks;
    const int threads = items * tile_.each < 16 ? 1 : pool.threads();
    const auto heads =
        static_cast<std::int64_t>(tile_.heads.size());  // chunk by chunk, as they lie
    pool.run(items, threads, [&](std::int64_t i, int) { sum_chunk(i % heads, i / heads); });
}

void Rest::sum_chunk(std::int64_t head, std::int64_t chunk) {
    const Codes codes = tile_.codes.at(chunk, tile_.heads[head]);
    const std::int64_t tokens =
        std::min<std::int64_t>(kChunk, tile_.blocks.tokens - chunk * kChunk);
    const int runs = static_cast<int>((tokens + kRun - 1) / kRun);
    for (int first = 0; first < tile_.each; first += kRowsMax) {
        SumItem item{codes,
                     runs,
                     std::min(kRowsMax, tile_.each - first),
                     static_cast<float>(factor_),
                     {},
                     {},
                     {},
                     {},
                     {}};
        for (int r = 0; r < item.rows; ++r) {
            const float* largest = tile_.largest(head, first + r) + chunk * kStrata;
            const float most = quantized_kernels().most(largest, kStrata);
            item.reference[r] = most > kNone ? most : 0;
            item.least[r] = least_mass(tile_.row(head, first + r), item.reference[r]);
            item.scores[r] = tile_.scores(head, first + r) + chunk * kChunk;
            item.values[r] = tile_.options.tail ? values(head, first + r, chunk) : nullptr;
        }
        quantized_kernels().sum(item);
        for (int r = 0; r < item.rows; ++r) {
            // What is left may lie far below what was estimated, or above it where it was read.
            const bool near = item.mass[r] > kFaint && item.mass[r] < 1 / kFaint;
            const bool any = near || sum_again(item, r);
            ChunkSum& part = sums_[at(head, first + r) + chunk];
            part.exponent = factor_ * item.reference[r];
            part.mass = part.coded = item.mass[r] >= 0 ? item.mass[r] : INFINITY;
            const float* slack = tile_.slack(head, first + r) + chunk * kRuns;
            const double most = *std::max_element(slack, slack + runs);
            // What underflows is less than 2^-126 for each token.
            if (any) part.bound = (part.mass * 1.00001 + 1e-34) * std::exp2(factor_ * most);
        }
    }
    for (int run = 0; run < runs && tile_.options.tail; ++run) {
        if (tile_.is_raw(chunk, tile_.heads[head], run)) add_raw_values(head, chunk, run);
    }
}

// The mass of a run, in units of a reference, whose values are taken for the mean of their chunk:
// of all runs together it is no more than a share of what is known to be attended.
float Rest::least_mass(const Row& row, float reference) const {
    const auto runs = static_cast<float>(tile_.chunks * kRuns);
    return kLeftOut / runs * std::exp2(row.known - static_cast<float>(factor_) * reference);
}

// Sums up one row of an item anew, relative to the largest score that is left. Returns whether
// there is any.
bool Rest::sum_again(SumItem& item, int r) const {
    float strata[kStrata];
    quantized_kernels().largest(item.scores[r], strata);
    const float most = quantized_kernels().most(strata, kStrata);
    item.reference[r] = most > kNone ? most : 0;
    if (item.values[r]) std::fill_n(item.values[r], dims_, 0.0f);
    SumItem one{};
    one.codes = item.codes;
    one.runs = item.runs;
    one.rows = 1;
    one.factor = item.factor;
    one.reference[0] = item.reference[r];
    one.scores[0] = item.scores[r];
    one.values[0] = item.values[r];
    quantized_kernels().sum(one);
    item.mass[r] = one.mass[0];
    return most > kNone;
}

// Values of a run that has no codes, as they were stored.
void Rest::add_raw_values(std::int64_t head, std::int64_t chunk, int run) {
    const int d = tile_.codes.head_dim;
    const std::int64_t begin = chunk * kChunk + run * kRun;
    const std::int64_t count = std::min<std::int64_t>(kRun, tile_.blocks.tokens - begin);
    std::vector<float> read(count * d);
    widen_values({tile_.blocks, tile_.heads[head], begin, count, read.data()});
    for (int r = 0; r < tile_.each; ++r) {
        const float* scores = tile_.scores(head, r) + begin;
        ChunkSum& part = sums_[at(head, r) + chunk];
        float* out = values(head, r, chunk) + dims_;
        for (std::int64_t t = 0; t < count; ++t) {
            if (scores[t] == kNone) continue;
            const auto weight = static_cast<float>(std::exp2(factor_ * scores[t] - part.exponent));
            part.coded = std::max(0.0, part.coded - double{weight});
            for (int i = 0; i < d && weight > 0; ++i) out[i] += weight * read[t * d + i];
        }
    }
}

double Rest::largest_exponent(std::int64_t head, int r) const {
    double most = kNone;
    for (std::int64_t chunk = 0; chunk < tile_.chunks; ++chunk) {
        const ChunkSum& part = sums_[at(head, r) + chunk];
        if (part.mass > 0) most = std::max(most, part.exponent);
    }
    return most;
}

double Rest::total(std::int64_t head, int r, bool bound) const {
    double most = kNone, sum = 0;
    for (int pass = 0; pass < 2; ++pass) {
        for (std::int64_t chunk = 0; chunk < tile_.chunks; ++chunk) {
            const ChunkSum& part = sums_[at(head, r) + chunk];
            const double mass = bound ? part.bound : part.mass;
            if (!(mass > 0)) continue;
            if (pass == 0) most = std::max(most, part.exponent);
            if (pass == 1) sum += mass * std::exp2(part.exponent - most);
        }
    }
    if (sum == 0) return kNone;
    return sum == sum ? (most + std::log2(sum)) * kLn2 : INFINITY;
}

void Rest::tail(std::int64_t head, int r, float* out) const {
    const int d = tile_.codes.head_dim;
    const double most = largest_exponent(head, r);
    double total = 0;
    double rotated[kHeadDimMax] = {}, stored[kHeadDimMax] = {};
    for (std::int64_t chunk = 0; chunk < tile_.chunks; ++chunk) {
        const ChunkSum& part = sums_[at(head, r) + chunk];
        if (!(part.mass > 0)) continue;
        const double share = std::exp2(part.exponent - most);
        const float* values = values_ + (at(head, r) + chunk) * (dims_ + d);
        const float* centre = tile_.codes.at(chunk, tile_.heads[head]).centres + d;
        total += share * part.mass;
        for (int i = 0; i < d; ++i) {
            rotated[i] += share * values[i];
            stored[i] += share * (part.coded * centre[i] + values[dims_ + i]);
        }
    }
    float turned[kHeadDimMax];
    for (int i = 0; i < d; ++i) turned[i] = total > 0 ? static_cast<float>(rotated[i] / total) : 0;
    unrotate(turned, d);
    for (int i = 0; i < d; ++i) {
        out[i] = turned[i] + (total > 0 ? static_cast<float>(stored[i] / total) : 0);
    }
}

}  // namespace kvdb::indexes::quantized
