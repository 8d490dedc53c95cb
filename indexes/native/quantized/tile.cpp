#include "tile.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../dot.h"
#include "../score/kernels.h"
#include "thread_pool.h"

namespace kvdb::indexes::quantized {
namespace {

// What float32 sums may be wrong by, relative to the lengths of query and key.
constexpr float kSumRounding = 1e-5f;
constexpr int kFirstBytes =
    4096;  // of a chunk's codes, which are fetched while bounds are computed

// The length of a vector, rounded up.
float norm_up(const float* x, int n) {
    return static_cast<float>(length(x, n) * 1.000001);
}

Row make_row(const float* q, int d, std::int64_t number, std::int64_t i) {
    float rest[kHeadDimMax];
    Row row{number, i, q, norm_up(q, d), 0, round_query(q, d, rest), {}, {}};
    row.error = norm_up(rest, d) + kSumRounding * row.norm;
    return row;
}

}  // namespace

Tile::Tile(const Blocks& blocks, const Codes& codes, const QueryRows& queries,
           const SearchOptions& options, std::int64_t first, std::int64_t count)
    : blocks(blocks),
      codes(codes),
      queries(queries),
      options(options),
      exact(options.tight || options.retrieval == SearchOptions::Retrieval::everything),
      chunks(chunks_of(blocks.tokens)),
      each(static_cast<int>(queries.group * count)),
      heads(queries.heads(blocks.geometry.kv_heads)) {
    const int d = blocks.geometry.head_dim;
    rows.reserve(heads.size() * each);
    for (const int head : heads) {
        for (int r = 0; r < each; ++r) {
            const std::int64_t i = first + r % count;
            const std::int64_t number =
                (std::int64_t{head} * queries.group + r / count) * queries.n + i;
            rows.push_back(make_row(queries.q + number * d, d, number, i));
        }
    }
    const auto all = static_cast<std::int64_t>(rows.size()) * chunks;
    thread_local Scratch scratch;
    scores_ = scratch.reserve(std::size_t(all) * (kChunk + kStrata + kRuns));
    largest_ = scores_ + all * kChunk;
    slack_ = largest_ + all * kStrata;
}

bool Tile::is_raw(std::int64_t chunk, int kv_head, int run) const {
    return std::isinf(codes.at(chunk, kv_head).bounds[run]);
}

void Tile::scan() {
    ThreadPool& pool = ThreadPool::instance();
    const auto items = static_cast<std::int64_t>(heads.size()) * chunks;
    const int threads = items * each < 16 ? 1 : pool.threads();
    const auto count = static_cast<std::int64_t>(heads.size());  // chunk by chunk, as they lie
    pool.run(items, threads, [&](std::int64_t i, int) { scan_chunk(i % count, i / count); });
}

void Tile::scan_chunk(std::int64_t head, std::int64_t chunk) {
    const Codes at = codes.at(chunk, heads[head]);
    for (int i = 0; i < kFirstBytes && !exact; i += 64) __builtin_prefetch(at.keys + i);
    const int d = codes.head_dim;
    const std::int64_t tokens = std::min<std::int64_t>(kChunk, blocks.tokens - chunk * kChunk);
    const float centre = norm_up(at.centres, d);
    for (int first = 0; first < each; first += kScanRows) {
        ScanItem item{at,
                      static_cast<int>((tokens + kRun - 1) / kRun),
                      std::min(kScanRows, each - first),
                      {},
                      {},
                      {},
                      {}};
        for (int r = 0; r < item.rows; ++r) {
            const Row& row = this->row(head, first + r);
            item.query[r] = &row.query;
            item.base[r] = static_cast<float>(dot(row.q, at.centres, d));
            item.scores[r] = scores(head, first + r) + chunk * kChunk;
            item.largest[r] = largest_ + (this->at(head, first + r) + chunk) * kStrata;
            std::fill_n(item.largest[r], kStrata, kNone);
            bound(row, at, centre, slack_ + (this->at(head, first + r) + chunk) * kRuns);
        }
        if (!exact) quantized_kernels().scan(item);
    }
    bool changed = exact || tokens < kChunk;
    for (int run = 0; run * kRun < tokens; ++run) {
        if (!exact && !is_raw(chunk, heads[head], run)) continue;
        score_run(head, chunk, run);
        changed = true;
    }
    for (int r = 0; r < each; ++r) {
        float* scores = this->scores(head, r) + chunk * kChunk;
        std::fill(scores + tokens, scores + kChunk, kNone);
        if (hide(row(head, r), chunk, scores) || changed) {
            quantized_kernels().largest(scores, largest_ + (this->at(head, r) + chunk) * kStrata);
        }
    }
}

// How far the scores of each run may be from the truth.
void Tile::bound(const Row& row, const Codes& chunk, float centre, float* slack) const {
    const float *errors = chunk.bounds, *reaches = chunk.bounds + kRuns;
    const float estimated = exact ? 0.0f : 1.0f;
    for (int run = 0; run < kRuns; ++run) {
        const bool raw = std::isinf(errors[run]);
        const float error = raw ? 0 : errors[run], reach = reaches[run];
        const float coded = raw ? 0 : estimated * (row.norm * error + row.error * reach);
        const float sum = coded + kSumRounding * row.norm * (reach + (raw ? 0 : centre + error));
        slack[run] = sum == sum ? sum : std::numeric_limits<float>::infinity();
    }
}

void Tile::score_run(std::int64_t head, std::int64_t chunk, int run) {
    const std::int64_t begin = chunk * kChunk + run * kRun;
    std::vector<std::int32_t> tokens;
    for (std::int64_t t = begin; t < std::min(begin + kRun, blocks.tokens); ++t) {
        tokens.push_back(static_cast<std::int32_t>(t));
    }
    score(head, 0, each, tokens, scores(head, 0) + begin, chunks * kChunk);
}

void Tile::score(std::int64_t head, int r, int count, const std::vector<std::int32_t>& tokens,
                 float* out, std::int64_t stride) const {
    const int d = blocks.geometry.head_dim;
    std::vector<float> q(std::size_t(count) * d);
    for (int j = 0; j < count; ++j) {
        std::copy_n(row(head, r + j).q, d, q.begin() + std::int64_t{j} * d);
    }
    score_tokens({blocks, heads[head], q.data(), count, tokens.data(),
                  static_cast<std::int64_t>(tokens.size()), out, stride});
}

bool Tile::hide(const Row& row, std::int64_t chunk, float* scores) const {
    const std::int64_t first = chunk * kChunk;
    const std::int64_t begin = std::clamp<std::int64_t>(queries.begin[row.i] - first, 0, kChunk);
    const std::int64_t end = std::clamp<std::int64_t>(queries.end[row.i] - first, begin, kChunk);
    std::fill(scores, scores + begin, kNone);
    std::fill(scores + end, scores + kChunk, kNone);
    if (!queries.hidden) return begin > 0 || end < kChunk;
    for (std::int64_t t = begin; t < end; ++t) {
        if (queries.is_hidden(first + t)) scores[t] = kNone;
    }
    return true;
}

std::int64_t Tile::visible(std::int64_t i) const {
    std::int64_t count = std::max<std::int64_t>(queries.end[i] - queries.begin[i], 0);
    if (!queries.hidden) return count;
    for (std::int64_t t = queries.begin[i]; t < queries.end[i]; ++t) count -= queries.is_hidden(t);
    return count;
}

}  // namespace kvdb::indexes::quantized
