#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>

#include "flat.h"
#include "rotate.h"
#include "thread_pool.h"

namespace kvdb::indexes {
namespace {

constexpr int kSpan = 8;              // chunks of an item
constexpr int kSparse = kChunk / 8;   // keys of a chunk that are looked at one by one
constexpr int kMany = kChunk / 8;     // with more, a better threshold is looked for
constexpr int kDense = kChunk / 2;    // with more even so, it is waited for
constexpr int kSamples = 32;          // tokens of each KV head scored for an estimate
constexpr int kSeeds = 64;            // and, at most, scored for a first threshold

void raise(std::atomic<float>& value, float to) {
    float seen = value.load(std::memory_order_relaxed);
    while (to > seen && !value.compare_exchange_weak(seen, to, std::memory_order_relaxed)) {
    }
}

// One search: its items run on several threads.
class Search {
  public:
    Search(const Blocks& blocks, const FlatCodes& codes, const QueryRows& queries,
           const FlatWanted& wanted, float scale)
        : blocks_(blocks),
          codes_(codes),
          queries_(queries),
          wanted_(wanted),
          scale_(scale),
          heads_(blocks.geometry.kv_heads),
          rows_(queries.rows()),
          tiles_((rows_ + kTile - 1) / kTile),
          score_(score_kernels().score[static_cast<int>(blocks.geometry.dtype)]),
          best_(heads_ * rows_) {
        for (std::int64_t i = 0; i < queries.n; ++i) {
            begin_ = std::min(begin_, queries.begin[i]);
            end_ = std::max(end_, queries.end[i]);
            visible_.push_back(count_visible(queries, i));
        }
        first_chunk_ = begin_ / kChunk;
        chunks_ = begin_ < end_ ? (end_ + kChunk - 1) / kChunk - first_chunk_ : 0;
        spans_ = (chunks_ + kSpan - 1) / kSpan;
        for (std::int64_t r = 0; r < heads_ * rows_; ++r) {
            best_[r] = wanted.k > 0 ? -INFINITY : queries.floor[r];
        }
        if (wanted.k > 0) {
            top_.resize(heads_ * rows_);
            locks_ = std::make_unique<std::mutex[]>(heads_ * rows_);
        }
    }

    FlatFound run() {
        ThreadPool& pool = ThreadPool::instance();
        const int threads = (end_ - begin_) * heads_ * rows_ < 1024 ? 1 : pool.threads();
        slots_ = std::vector<Slot>(threads);
        records_.resize(heads_ * spans_ * rows_);
        late_records_.resize(records_.size());
        deferred_.resize(heads_ * spans_ * tiles_);
        tile_.resize(heads_ * tiles_);
        samples_.resize(heads_ * rows_ * kSamples);
        sampled_.resize(heads_ * kSamples);
        if (chunks_ > 0) {
            pool.run(heads_ * tiles_, threads, [&](std::int64_t item, int slot) {
                seed(static_cast<int>(item / tiles_), item % tiles_, slots_[slot]);
            });
            pool.run(heads_ * spans_, threads, [&](std::int64_t item, int slot) {
                for (std::int64_t t = 0; t < tiles_; ++t) span(item, t, slot, false);
            });
            if (any_deferred_) {
                pool.run(heads_ * spans_, threads, [&](std::int64_t item, int slot) {
                    for (std::int64_t t = 0; t < tiles_; ++t) {
                        if (deferred_[item * tiles_ + t]) span(item, t, slot, true);
                    }
                });
            }
        }
        return gather(threads);
    }

  private:
    struct Record {  // hits of one row in one item
        std::int32_t slot = 0;
        std::int64_t begin = 0, end = 0;
    };
    struct Slot {  // of one thread
        std::vector<std::int32_t> ids, tokens;
        std::vector<float> hits, scores;
        std::vector<FlatSieve> sieves{kSpan};
        std::int64_t sieved[kSpan];  // chunks
        int sieves_used = 0;
        std::int64_t by_length = 0, by_code = 0, scored = 0, nbytes = 0;
    };

    std::int64_t row_of(int head, std::int64_t tile, int r) const {
        return head * rows_ + std::min(tile * kTile + r, rows_ - 1);
    }
    int rows_in(std::int64_t tile) const {
        return static_cast<int>(std::min<std::int64_t>(kTile, rows_ - tile * kTile));
    }
    std::int64_t query_of(std::int64_t row) const { return row % rows_ % queries_.n; }

    // No token below is wanted by the row any more.
    float threshold(std::int64_t row) const {
        const float best = best_[row].load(std::memory_order_relaxed);
        if (wanted_.k > 0) return best;
        return wanted_.beta == INFINITY ? -INFINITY : best - wanted_.beta;
    }

    // Visible tokens of a chunk to any row of a tile.
    std::int64_t visible(std::int64_t tile, std::int64_t chunk, std::uint64_t* bits) const {
        std::int64_t count = visible_bits(queries_, query_of(tile * kTile), chunk, bits);
        if (queries_.n == 1) return count;
        std::uint64_t more[kChunkWords];
        for (int r = 1; r < rows_in(tile); ++r) {
            visible_bits(queries_, query_of(tile * kTile + r), chunk, more);
            for (int w = 0; w < kChunkWords; ++w) bits[w] |= more[w];
        }
        count = 0;
        for (int w = 0; w < kChunkWords; ++w) count += __builtin_popcountll(bits[w]);
        return count;
    }

    // Exact scores of `tokens`, [kTile rows][tokens], in slot.scores.
    void score(int head, std::int64_t tile, const std::vector<std::int32_t>& tokens, Slot& slot) {
        const auto count = static_cast<std::int64_t>(tokens.size());
        if (slot.scores.size() < static_cast<std::size_t>(kTile * count)) {
            slot.scores.resize(kTile * count);
        }
        score_({blocks_, head, queries_.q + row_of(head, tile, 0) * codes_.head_dim,
                rows_in(tile), tokens.data(), count, slot.scores.data(), count});
        slot.scored += count;
        slot.nbytes += count * static_cast<std::int64_t>(blocks_.geometry.row_bytes());
    }

    // A first threshold: the longest keys of some chunks, and some tokens evenly spread, which also
    // tell what is missed.
    void seed(int head, std::int64_t tile, Slot& slot) {
        tile_[head * tiles_ + tile] = make_tile(queries_, codes_.head_dim, head, tile);
        slot.tokens.clear();
        for (int s = 0; s < kSamples; ++s) {
            slot.tokens.push_back(
                static_cast<std::int32_t>(begin_ + (end_ - begin_) * (2 * s + 1) / (2 * kSamples)));
        }
        if (tile == 0) std::copy_n(slot.tokens.data(), kSamples, &sampled_[head * kSamples]);
        if (wanted_.k == 0 && wanted_.beta < INFINITY) {
            const std::int64_t step = (chunks_ + kSeeds - 1) / kSeeds;
            for (std::int64_t c = first_chunk_; c < first_chunk_ + chunks_; c += step) {
                const std::int32_t token = codes_.longest[codes_.at(c, head)];
                if (token >= begin_ && token < end_) slot.tokens.push_back(token);
            }
        }
        score(head, tile, slot.tokens, slot);
        const std::size_t count = slot.tokens.size();
        for (int r = 0; r < rows_in(tile); ++r) {
            const std::int64_t row = row_of(head, tile, r), i = query_of(row);
            const float* scores = &slot.scores[r * count];
            std::copy_n(scores, kSamples, &samples_[row * kSamples]);
            if (wanted_.k > 0) continue;
            for (std::size_t t = 0; t < count; ++t) {
                if (queries_.visible(i, slot.tokens[t])) raise(best_[row], scores[t]);
            }
        }
    }

    // The tokens of some chunks that the rows of a tile may want.
    void span(std::int64_t item, std::int64_t tile, int slot_number, bool late) {
        Slot& slot = slots_[slot_number];
        const int head = static_cast<int>(item / spans_);
        std::uint8_t& deferred = deferred_[item * tiles_ + tile];
        slot.tokens.clear();
        slot.sieves_used = 0;
        for (int c = 0; c < kSpan; ++c) {
            const std::int64_t chunk = item % spans_ * kSpan + c;
            if (chunk >= chunks_ || (late && !(deferred >> c & 1))) continue;
            if (chunk + 1 < chunks_) bring(codes_.at(first_chunk_ + chunk + 1, head));
            if (!scan(head, tile, first_chunk_ + chunk, slot, late)) {
                deferred |= static_cast<std::uint8_t>(1 << c);
                any_deferred_.store(true, std::memory_order_relaxed);
            }
        }
        for (int u = 0; u < slot.sieves_used; ++u) sieve(slot.sieves[u], slot.sieved[u], slot);
        if (slot.tokens.empty()) return;
        // Of one item the tokens rise, whichever way each chunk went.
        if (slot.sieves_used > 0) std::sort(slot.tokens.begin(), slot.tokens.end());
        score(head, tile, slot.tokens, slot);
        std::vector<Record>& records = late ? late_records_ : records_;
        for (int r = 0; r < rows_in(tile); ++r) {
            keep(head, tile, r, slot, records[item * rows_ + tile * kTile + r], slot_number);
        }
    }

    // Prefetches what is read of every chunk.
    void bring(std::int64_t at) const {
        const auto* centre = reinterpret_cast<const char*>(codes_.centre(at));
        for (int i = 0; i <= 4 * codes_.head_dim; i += 64) __builtin_prefetch(centre + i);
        const auto* norms = reinterpret_cast<const char*>(codes_.length(at, kNorm));
        for (int i = 0; i < 2 * kChunk; i += 64) __builtin_prefetch(norms + i);
    }

    // Appends a row's hits to the slot's.
    void keep(int head, std::int64_t tile, int r, Slot& slot, Record& record, int slot_number) {
        const std::int64_t row = row_of(head, tile, r), i = query_of(row);
        const std::size_t count = slot.tokens.size();
        const float* scores = &slot.scores[r * count];
        float least = threshold(row), best = best_[row].load(std::memory_order_relaxed);
        record = {slot_number, static_cast<std::int64_t>(slot.ids.size()), 0};
        for (std::size_t t = 0; t < count; ++t) {
            if (!(scores[t] >= least) || !queries_.visible(i, slot.tokens[t])) continue;
            slot.ids.push_back(slot.tokens[t]);
            slot.hits.push_back(scores[t]);
            if (wanted_.k == 0 && scores[t] > best) {
                best = scores[t];
                raise(best_[row], best);
                least = threshold(row);
            }
        }
        record.end = static_cast<std::int64_t>(slot.ids.size());
        if (wanted_.k > 0) rank(row, slot, record);
    }

    // The k-th largest score so far becomes the threshold.
    void rank(std::int64_t row, const Slot& slot, const Record& record) {
        const std::lock_guard lock(locks_[row]);
        std::vector<float>& top = top_[row];
        for (std::int64_t h = record.begin; h < record.end; ++h) {
            const bool full = static_cast<std::int64_t>(top.size()) >= wanted_.k;
            if (full && !(slot.hits[h] > top.front())) continue;
            if (full) {
                std::pop_heap(top.begin(), top.end(), std::greater<>());
                top.pop_back();
            }
            top.push_back(slot.hits[h]);
            std::push_heap(top.begin(), top.end(), std::greater<>());
        }
        if (static_cast<std::int64_t>(top.size()) >= wanted_.k) raise(best_[row], top.front());
    }

    // Appends a chunk's candidates to slot.tokens; false if that is better done later.
    bool scan(int head, std::int64_t tile, std::int64_t chunk, Slot& slot, bool late) {
        std::uint64_t bits[kChunkWords];
        if (visible(tile, chunk, bits) == 0) return true;
        FlatPrune prune;
        bool anything = false;
        for (int r = 0; r < kTile; ++r) {
            prune.threshold[r] = threshold(row_of(head, tile, r));
            anything = anything || prune.threshold[r] == -INFINITY;
        }
        if (anything) {
            append(chunk, bits, slot.tokens);
            return true;
        }
        const std::int64_t at = codes_.at(chunk, head);
        prune.scan = make_scan(codes_, tile_[head * tiles_ + tile], at);
        std::int64_t left = by_length(prune, bits);
        slot.nbytes += kChunk * 2;
        slot.by_length += left;
        if (left <= kSparse) {
            prepare_sieve(prune, chunk, bits, slot);
            return true;
        }
        left = by_code(prune, bits, slot);
        if (left > kMany && wanted_.k == 0) {
            climb(head, tile, chunk, prune, bits, slot);
            left = look_again(head, tile, prune, bits);
            if (!late && left > kDense) return false;
        }
        slot.by_code += left;
        append(chunk, bits, slot.tokens);
        return true;
    }

    // Notes the keys whose signs are to be looked at, and has them brought.
    void prepare_sieve(const FlatPrune& prune, std::int64_t chunk, const std::uint64_t* bits,
                       Slot& slot) const {
        FlatSieve& sieve = slot.sieves[slot.sieves_used];
        slot.sieved[slot.sieves_used++] = chunk;
        sieve.scan = prune.scan;
        std::copy_n(prune.threshold, kTile, sieve.threshold);
        sieve.count = 0;
        const int stride = FlatCodes::sign_bytes(codes_.head_dim);
        for (int w = 0; w < kChunkWords; ++w) {
            for (std::uint64_t rest = bits[w]; rest; rest &= rest - 1) {
                const int key = 64 * w + __builtin_ctzll(rest);
                __builtin_prefetch(sieve.scan.signs + key * stride);
                __builtin_prefetch(sieve.scan.signs + (key + 1) * stride - 1);
                sieve.keys[sieve.count++] = static_cast<std::uint16_t>(key);
            }
        }
        slot.nbytes += std::int64_t{sieve.count} * stride;
    }

    static void sieve(FlatSieve& sieve, std::int64_t chunk, Slot& slot) {
        flat_kernels().sieve(sieve);
        slot.by_code += sieve.count;
        for (int i = 0; i < sieve.count; ++i) {
            slot.tokens.push_back(static_cast<std::int32_t>(chunk * kChunk + sieve.keys[i]));
        }
    }

    static void append(std::int64_t chunk, const std::uint64_t* bits,
                       std::vector<std::int32_t>& tokens) {
        for (int w = 0; w < kChunkWords; ++w) {
            for (std::uint64_t rest = bits[w]; rest; rest &= rest - 1) {
                tokens.push_back(
                    static_cast<std::int32_t>(chunk * kChunk + 64 * w + __builtin_ctzll(rest)));
            }
        }
    }

    // Clears keys too short for every row: q.k <= q.centre + |q| * |k - centre|.
    static std::int64_t by_length(const FlatPrune& prune, std::uint64_t* bits) {
        float shortest = INFINITY;
        for (int r = 0; r < kTile; ++r) {
            const float left = prune.threshold[r] - prune.scan.base[r] - prune.scan.slack[r];
            const float length = left / prune.scan.tile->norm[r] * (1 - 1e-6f);
            shortest = length < shortest ? length : shortest;
            if (!(length > 0)) shortest = 0;  // or no number
        }
        // To bfloat16, rounded down.
        std::uint32_t least;
        std::memcpy(&least, &shortest, sizeof least);
        return flat_kernels().at_least(prune.scan.lengths, static_cast<std::uint16_t>(least >> 16),
                                       bits);
    }

    std::int64_t by_code(FlatPrune& prune, std::uint64_t* bits, Slot& slot) const {
        prune.groups = 0;
        for (int g = 0; g < kChunkGroups; ++g) {
            const bool some = bits[g / 4] >> (g % 4 * kKeyGroup) & 0xffff;
            prune.groups |= std::uint64_t{some} << g;
        }
        flat_kernels().prune(prune);
        std::int64_t count = 0;
        for (int w = 0; w < kChunkWords; ++w) {
            bits[w] &= prune.kept[w];
            count += __builtin_popcountll(bits[w]);
        }
        const std::int64_t groups = __builtin_popcountll(prune.groups);
        slot.nbytes += kKeyGroup * (groups * 6 + (groups + prune.refined) * codes_.head_dim / 2);
        return count;
    }

    // Scores the most promising key of each row, for a better threshold.
    void climb(int head, std::int64_t tile, std::int64_t chunk, const FlatPrune& prune,
               const std::uint64_t* bits, Slot& slot) {
        std::vector<std::int32_t> candidates, tokens;
        append(0, bits, candidates);
        for (int r = 0; r < rows_in(tile); ++r) {
            std::int32_t top = candidates.front();
            for (const std::int32_t key : candidates) {
                if (prune.upper[r][key] > prune.upper[r][top]) top = key;
            }
            tokens.push_back(static_cast<std::int32_t>(chunk * kChunk + top));
        }
        score(head, tile, tokens, slot);
        for (int r = 0; r < rows_in(tile); ++r) {
            const std::int64_t row = row_of(head, tile, r);
            for (std::size_t t = 0; t < tokens.size(); ++t) {
                if (queries_.visible(query_of(row), tokens[t])) {
                    raise(best_[row], slot.scores[r * tokens.size() + t]);
                }
            }
        }
    }

    // Clears keys whose bounds miss the thresholds that now hold.
    std::int64_t look_again(int head, std::int64_t tile, const FlatPrune& prune,
                            std::uint64_t* bits) const {
        float least[kTile];
        for (int r = 0; r < kTile; ++r) least[r] = threshold(row_of(head, tile, r));
        std::int64_t count = 0;
        for (int w = 0; w < kChunkWords; ++w) {
            for (std::uint64_t rest = bits[w]; rest; rest &= rest - 1) {
                const int key = 64 * w + __builtin_ctzll(rest);
                bool pruned = true;
                for (int r = 0; r < kTile; ++r) pruned &= prune.upper[r][key] < least[r];
                if (pruned) bits[w] ^= rest & -rest;
                count += !pruned;
            }
        }
        return count;
    }

    FlatFound gather(int threads) {
        FlatFound found;
        const std::int64_t rows = heads_ * rows_;
        found.rows.offsets.assign(rows + 1, 0);
        found.caps.resize(rows);
        found.missed.resize(rows);
        found.bound.resize(rows);
        for (std::int64_t r = 0; r < rows; ++r) {
            const float least = threshold(r);
            std::int64_t count = 0;
            each_hit(r, [&](std::int32_t, float score) { count += score >= least; });
            if (wanted_.k > 0) count = std::min(count, wanted_.k);
            found.rows.offsets[r + 1] = found.rows.offsets[r] + count;
        }
        found.rows.ids.resize(found.rows.offsets[rows]);
        found.rows.scores.resize(found.rows.offsets[rows]);
        const int used = found.rows.offsets[rows] < 1 << 14 ? 1 : threads;
        ThreadPool::instance().run(rows, used, [&](std::int64_t r, int) {
            fill(r, found);
            weigh(r, found);
        });
        found.passed.assign(4, 0);
        for (const Slot& slot : slots_) {
            found.passed[0] += slot.by_length;
            found.passed[1] += slot.by_code;
            found.passed[2] += slot.scored;
            found.passed[3] += slot.nbytes;
        }
        return found;
    }

    template <class Body>
    void each_hit(std::int64_t row, Body&& body) const {
        const std::int64_t first = row / rows_ * spans_;
        for (const std::vector<Record>* records : {&records_, &late_records_}) {
            for (std::int64_t s = 0; s < spans_; ++s) {
                const Record& record = (*records)[(first + s) * rows_ + row % rows_];
                const Slot& slot = slots_[record.slot];
                for (std::int64_t h = record.begin; h < record.end; ++h) {
                    body(slot.ids[h], slot.hits[h]);
                }
            }
        }
    }

    void fill(std::int64_t row, FlatFound& found) const {
        const float least = threshold(row);
        const std::int64_t begin = found.rows.offsets[row], end = found.rows.offsets[row + 1];
        std::int32_t* ids = found.rows.ids.data() + begin;
        float* scores = found.rows.scores.data() + begin;
        if (wanted_.k == 0 && !any_deferred_) {
            each_hit(row, [&](std::int32_t id, float score) {
                if (!(score >= least)) return;
                *ids++ = id;
                *scores++ = score;
            });
            return;
        }
        std::vector<std::pair<float, std::int32_t>> hits;
        each_hit(row, [&](std::int32_t id, float score) {
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

    // What the row missed: nothing exceeds the threshold, and the sample says what is usual.
    void weigh(std::int64_t row, FlatFound& found) const {
        const float least = threshold(row);
        const std::int64_t i = query_of(row);
        const std::int64_t left =
            visible_[i] - (found.rows.offsets[row + 1] - found.rows.offsets[row]);
        found.caps[row] = least;
        found.missed[row] = found.bound[row] = -INFINITY;
        if (left == 0) return;
        const double cap = double{scale_} * least;
        found.bound[row] = std::nextafter(static_cast<float>(cap + std::log(double(left)) + 1e-5),
                                          INFINITY);
        if (!std::isfinite(cap)) {
            found.missed[row] = found.bound[row] = INFINITY;
            return;
        }
        double sum = 0;
        int count = 0;
        for (int s = 0; s < kSamples; ++s) {
            const float score = samples_[row * kSamples + s];
            if (!queries_.visible(i, sampled_[row / rows_ * kSamples + s]) || !(score < least)) {
                continue;
            }
            sum += std::exp(double{scale_} * score - cap);
            ++count;
        }
        const double mean = count ? sum / count : 1;
        found.missed[row] = std::min(found.bound[row],
                                     static_cast<float>(cap + std::log(mean * double(left))));
    }

    const Blocks& blocks_;
    const FlatCodes& codes_;
    const QueryRows& queries_;
    const FlatWanted wanted_;
    const float scale_;
    const std::int64_t heads_, rows_, tiles_;
    void (*const score_)(const ScoreItem&);
    std::int64_t begin_ = INT64_MAX, end_ = 0, first_chunk_ = 0, chunks_ = 0, spans_ = 0;
    std::vector<std::int64_t> visible_;      // [n]
    std::vector<std::atomic<float>> best_;   // the largest q.k so far, or the k-th largest
    std::vector<std::vector<float>> top_;    // heaps
    std::unique_ptr<std::mutex[]> locks_;
    std::vector<Slot> slots_;
    std::vector<Record> records_, late_records_;  // [heads][spans][rows]
    std::vector<std::uint8_t> deferred_;          // [heads][spans][tiles] a bit for each chunk
    std::atomic<bool> any_deferred_{false};
    std::vector<FlatTile> tile_;
    std::vector<float> samples_;           // [heads][rows][kSamples]
    std::vector<std::int32_t> sampled_;    // [heads][kSamples]
};

}  // namespace

FlatFound flat_search(const Blocks& blocks, const FlatCodes& codes, const QueryRows& queries,
                      const FlatWanted& wanted, float scale) {
    return Search(blocks, codes, queries, wanted, scale).run();
}

}  // namespace kvdb::indexes
