#include "walk.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../score/kernels.h"

namespace kvdb::indexes {

namespace {

constexpr int kBatch = 8;  // tokens expanded together, so that their neighbours' codes come together
constexpr int kStarts = 4;  // probes of each row that are expanded whatever their score
constexpr std::int64_t kScanned = 512;   // codes estimated together
constexpr std::int64_t kDenseCheck = 128;
constexpr std::int64_t kBudgetLeast = 2048;  // tokens that any walk may meet
constexpr float kNone = -std::numeric_limits<float>::infinity();

void prefetch(const void* from, std::int64_t bytes) {
    for (std::int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(static_cast<const std::byte*>(from) + i);
    }
}

}  // namespace

void Walk::run(const Graph& graph, const Probes& probes, const Blocks& blocks,
               const QueryRows& queries, const SearchOptions& options, const Item& item,
               RowFound* out) {
    graph_ = &graph;
    probes_ = &probes;
    blocks_ = &blocks;
    queries_ = &queries;
    options_ = options;
    begin(item);
    if (item.visible > 0) {
        outliers();
        start();
        if (options.scan) {
            scan();
        } else if (options.listed) {
            walk_listed();
        } else {
            walk_best_first();
        }
    }
    scanned_ += static_cast<std::int64_t>(visited_.count());
    nbytes_ += scanned_ * graph.stride;
    for (int r = 0; r < item.heads; ++r) {
        if (!item.rows || item.rows[r]) finish(r, out[r]);
    }
}

void Walk::begin(const Item& item) {
    item_ = item;
    width_ = options_.k > 0 ? options_.k + options_.k / 2 + 32 : 0;
    budget_ = std::max(kBudgetLeast, static_cast<std::int64_t>(
                                         double{options_.budget} * static_cast<double>(item.visible))) +
              8 * width_;
    selective_ = 4 * item.visible < 3 * graph_->tokens;
    scanned_ = nbytes_ = 0;
    visited_.clear();
    steps_.clear();
    list_.clear();
    fresh_.clear();
    rest_.resize(graph_->head_dim);
    lens_.resize(item.heads, graph_->stride);
    rows_.resize(item.heads);
    for (int r = 0; r < item.heads; ++r) {
        lens_.set(r, *graph_, item.kv_head, query(r), rest_.data());
        Row& row = rows_[r];
        const std::int64_t at = (item.kv_head * queries_->group + item.head + r) * queries_->n;
        row.floor = options_.k > 0 ? kNone : queries_->floor[at + item.query];
        row.best = row.seen = kNone;
        row.noise = lens_.noise[r];
        row.limit = row.floor - row.noise - options_.beta;
        row.patience = options_.patience;
        row.dense = false;
        row.done = item.rows && !item.rows[r];
        row.check = kDenseCheck;
        row.found.clear();
        row.largest.clear();
    }
}

const float* Walk::query(std::int64_t r) const {
    const std::int64_t head = item_.kv_head * queries_->group + item_.head + r;
    return queries_->q + (head * queries_->n + item_.query) * graph_->head_dim;
}

void Walk::estimate(const std::uint8_t* codes, const std::uint32_t* tokens, std::int64_t count) {
    if (room_ < count || static_cast<std::int64_t>(scores_.size()) < item_.heads * room_) {
        room_ = std::max<std::int64_t>(count, 1024);
        scores_.resize(item_.heads * room_);
    }
    graph_kernels().estimate({codes, graph_->stride, tokens, count, lens_.bytes.data(),
                              lens_.factor.data(), lens_.bias.data(), item_.heads, scores_.data(),
                              room_});
}

// Keys that codes do not hold well are looked at themselves, always.
void Walk::outliers() {
    const std::int32_t* tokens = probes_->outliers + item_.kv_head * probes_->outlier_count;
    std::int64_t count = 0;
    while (count < probes_->outlier_count && tokens[count] >= 0) ++count;
    if (count == 0) return;
    std::vector<float> exact(count);
    for (int r = 0; r < item_.heads; ++r) {
        score_kernels().score[static_cast<int>(blocks_->geometry.dtype)](
            {*blocks_, item_.kv_head, query(r), 1, tokens, count, exact.data(), 0});
        for (std::int64_t t = 0; t < count; ++t) {
            if (visible(tokens[t])) offer(rows_[r], tokens[t], exact[t]);
        }
    }
    for (std::int64_t t = 0; t < count; ++t) visited_.insert(tokens[t]);
    nbytes_ += count * static_cast<std::int64_t>(blocks_->geometry.row_bytes());
}

// Looks at all probes; first for the best, so that few of them become candidates.
void Walk::start() {
    const std::int64_t count = probes_->count;
    estimate(probes_->codes + item_.kv_head * count * graph_->stride, nullptr, count);
    probe_scores_.resize(item_.heads * count);
    const std::int32_t* tokens = probes_->tokens + item_.kv_head * count;
    probes_seen_ = 0;
    for (std::int64_t t = 0; t < count; ++t) {
        const bool seen = visible(tokens[t]);
        probes_seen_ += seen && t < probes_->random;
        for (int r = 0; r < item_.heads; ++r) {
            probe_scores_[r * count + t] = seen ? score_at(r, t) : kNone;
        }
    }
    for (int r = 0; r < item_.heads && options_.k == 0; ++r) {
        const float* scores = probe_scores_.data() + r * count;
        const float best = *std::max_element(scores, scores + count);
        if (best > rows_[r].best) raise(rows_[r], best);
    }
    if (options_.scan) {
        scanned_ += count;
        return;
    }
    // Probes that nobody wants are not remembered: to meet one again costs less.
    const float* margins = measure_margins(count);
    for (std::int64_t t = 0; t < count; ++t) {
        if (margins[t] >= 0 && visited_.insert(tokens[t])) push(tokens[t], t);
    }
    scanned_ += count;
    for (int r = 0; r < item_.heads; ++r) {
        if (!rows_[r].done) start_row(r, count);
    }
}

// The largest probes of a row are expanded even if they lie outside of the range.
void Walk::start_row(std::int64_t r, std::int64_t count) {
    const float* scores = scores_.data() + r * room_;  // hidden ones too: they lead on
    std::int32_t top[kStarts];
    int have = 0;
    for (std::int32_t t = 0; t < count; ++t) {
        if (have == kStarts && scores[t] <= scores[top[have - 1]]) continue;
        int at = have < kStarts ? have++ : kStarts - 1;
        for (; at > 0 && scores[top[at - 1]] < scores[t]; --at) top[at] = top[at - 1];
        top[at] = t;
    }
    Row& row = rows_[r];
    for (int j = 0; j < have; ++j) {
        const std::uint32_t token = probes_->tokens[item_.kv_head * count + top[j]];
        const float score = scores[top[j]];
        if (options_.listed) {
            list_.push_back(token);
        } else {
            steps_.push_back({score - row.limit, score, token, static_cast<std::uint32_t>(r)});
            std::push_heap(steps_.begin(), steps_.end());
        }
        prefetch(graph_->links_of(item_.kv_head) + std::int64_t{token} * graph_->degree,
                 4 * graph_->degree);
    }
}

void Walk::walk_best_first() {
    while (!steps_.empty()) {
        fresh_.clear();
        for (int taken = 0; taken < kBatch && !steps_.empty();) {
            std::pop_heap(steps_.begin(), steps_.end());
            const Step step = steps_.back();
            steps_.pop_back();
            if (!wants(step)) continue;
            expand(step.token);
            ++taken;
        }
        meet();
    }
}

bool Walk::wants(const Step& step) {
    Row& row = rows_[step.row];
    if (row.done) return false;
    if (step.score >= row.limit - options_.slack * options_.beta) return true;
    if (row.patience <= 0) return false;
    --row.patience;
    return true;
}

void Walk::walk_listed() {
    for (std::size_t at = 0; at < list_.size();) {
        fresh_.clear();
        for (int taken = 0; taken < kBatch && at < list_.size(); ++taken) expand(list_[at++]);
        meet();
        bool left = false;
        for (const Row& row : rows_) left = left || !row.done;
        if (!left) return;
    }
}

void Walk::scan() {
    const std::int64_t begin = queries_->begin[item_.query], end = queries_->end[item_.query];
    for (std::int64_t at = begin; at < end;) {
        fresh_.clear();
        for (; at < end && fresh_.size() < kScanned; ++at) {
            if (!queries_->is_hidden(at)) fresh_.push_back(static_cast<std::uint32_t>(at));
        }
        const auto count = static_cast<std::int64_t>(fresh_.size());
        estimate(graph_->codes_of(item_.kv_head), fresh_.data(), count);
        for (int r = 0; r < item_.heads; ++r) {
            Row& row = rows_[r];
            if (row.done) continue;
            for (std::int64_t t = 0; t < count; ++t) {
                if (score_at(r, t) >= row.limit) offer(row, fresh_[t], score_at(r, t));
            }
            if (static_cast<std::int64_t>(row.found.size()) > row.check) check_density(row, r);
        }
        scanned_ += count;
    }
}

void Walk::take(std::uint32_t token) {
    if (!visited_.insert(token)) return;
    prefetch(graph_->codes_of(item_.kv_head) + std::int64_t{token} * graph_->stride,
             graph_->stride);
    fresh_.push_back(token);
}

void Walk::expand(std::uint32_t token) {
    const std::uint32_t* links =
        graph_->links_of(item_.kv_head) + std::int64_t{token} * graph_->degree;
    nbytes_ += 4 * graph_->degree;
    int count = 0;
    hidden_.clear();
    for (; count < graph_->degree && links[count] < graph_->tokens; ++count) {
        if (selective_ && !visible(links[count])) hidden_.push_back(links[count]);
        take(links[count]);
    }
    if (2 * static_cast<int>(hidden_.size()) > count) {
        for (const std::uint32_t between : hidden_) expand_hidden(between);
    }
}

// Of the neighbours of a hidden token those that are not hidden.
void Walk::expand_hidden(std::uint32_t token) {
    const std::uint32_t* links =
        graph_->links_of(item_.kv_head) + std::int64_t{token} * graph_->degree;
    nbytes_ += 4 * graph_->degree;
    for (int j = 0; j < graph_->degree && links[j] < graph_->tokens; ++j) {
        if (visible(links[j])) take(links[j]);
    }
}

// Looks at the tokens that were taken.
void Walk::meet() {
    if (fresh_.empty()) return;
    estimate(graph_->codes_of(item_.kv_head), fresh_.data(),
             static_cast<std::int64_t>(fresh_.size()));
    const auto count = static_cast<std::int64_t>(fresh_.size());
    const float* margins = measure_margins(count);
    for (std::int64_t t = 0; t < count; ++t) {
        if (margins[t] >= 0) {
            push(fresh_[t], t);
        } else if (static_cast<std::int64_t>(list_.size()) < options_.least) {
            list_.push_back(fresh_[t]);
        }
    }
    for (int r = 0; r < item_.heads; ++r) {
        Row& row = rows_[r];
        if (static_cast<std::int64_t>(row.found.size()) > row.check) check_density(row, r);
    }
    if (static_cast<std::int64_t>(visited_.count()) > budget_) stop();
}

// The walk has met too much: rows that want much are left; when that does not end it, all are.
void Walk::stop() {
    bool any = false;
    for (Row& row : rows_) {
        compact(row);
        if (row.done || static_cast<std::int64_t>(row.found.size()) < kDenseCheck) continue;
        leave(row);
        any = true;
    }
    for (Row& row : rows_) {
        if (!any && !row.done) leave(row);
    }
    budget_ += budget_ / 4;
}

void Walk::leave(Row& row) {
    row.dense = row.done = true;
    row.found.clear();
}

// How far the scores lie above what some row may want of them: most tokens are told apart here,
// without a branch.
const float* Walk::measure_margins(std::int64_t count) {
    margins_.assign(count, kNone);
    for (int r = 0; r < item_.heads; ++r) {
        const Row& row = rows_[r];
        if (row.done) continue;
        float least = row.limit - options_.slack * options_.beta;
        if (row.patience > 0 && row.seen > kNone) least = std::min(least, far_below(row));
        if (!(least > kNone)) least = std::numeric_limits<float>::lowest();
        const float* scores = scores_.data() + r * room_;
        float* margins = margins_.data();
        for (std::int64_t t = 0; t < count; ++t) {
            margins[t] = std::max(margins[t], scores[t] - least);
        }
    }
    return margins_.data();
}

// From here on a step outside of the range does not come closer.
float Walk::far_below(const Row& row) const {
    return row.seen - (1 + options_.slack) * options_.beta;
}

// A token whose scores stand at `at`: it may be found, and it may be a step of the walk.
void Walk::push(std::uint32_t token, std::int64_t at) {
    const float beyond = options_.slack * options_.beta;
    float margin = kNone;
    std::uint32_t nearest = 0;
    for (int r = 0; r < item_.heads; ++r) {
        Row& row = rows_[r];
        if (row.done) continue;
        const float score = score_at(r, at);
        if (score >= row.limit && visible(token)) offer(row, token, score);
        if (score > row.seen) {
            row.seen = score;
            row.patience = options_.patience;
        }
        const bool far = score < row.limit - beyond &&
                         (row.patience <= 0 || score < far_below(row));
        if (!far && score - row.limit > margin) {
            margin = score - row.limit;
            nearest = static_cast<std::uint32_t>(r);
        }
    }
    if (margin == kNone) return;
    prefetch(graph_->links_of(item_.kv_head) + std::int64_t{token} * graph_->degree,
             4 * graph_->degree);
    if (options_.listed) {
        list_.push_back(token);
    } else {
        steps_.push_back({margin, score_at(nearest, at), token, nearest});
        std::push_heap(steps_.begin(), steps_.end());
    }
}

void Walk::offer(Row& row, std::uint32_t token, float score) {
    if (!options_.scan) {
        prefetch(blocks_->key(item_.kv_head, token),
                 static_cast<std::int64_t>(blocks_->geometry.row_bytes()));
    }
    row.found.push_back({score, token});
    if (options_.k > 0) {
        std::vector<float>& heap = row.largest;
        if (static_cast<std::int64_t>(heap.size()) < width_) {
            heap.push_back(score);
            std::push_heap(heap.begin(), heap.end(), std::greater<>());
        } else if (score > heap.front()) {
            std::pop_heap(heap.begin(), heap.end(), std::greater<>());
            heap.back() = score;
            std::push_heap(heap.begin(), heap.end(), std::greater<>());
        }
        if (static_cast<std::int64_t>(heap.size()) == width_) row.limit = heap.front();
    } else if (score > row.best) {
        raise(row, score);
    }
}

void Walk::raise(Row& row, float score) {
    row.best = score;
    // The errors of two estimates that do not know of each other.
    row.limit = std::max(row.floor - row.noise, score - 1.5f * row.noise) - options_.beta;
}

void Walk::compact(Row& row) const {
    std::erase_if(row.found, [&](const Candidate& found) { return found.score < row.limit; });
}

// The random probes tell whether a range that seems full is.
void Walk::check_density(Row& row, std::int64_t r) {
    compact(row);
    const auto have = static_cast<std::int64_t>(row.found.size());
    row.check = std::max(2 * have, kDenseCheck);
    if (options_.scan || options_.k > 0 || have < kDenseCheck) return;
    const float* scores = probe_scores_.data() + r * probes_->count;
    const auto inside = std::count_if(scores, scores + probes_->random,
                                      [&](float score) { return score >= row.limit; });
    const auto share = static_cast<double>(options_.dense_share);
    if (static_cast<double>(have) > share * static_cast<double>(item_.visible) ||
        static_cast<double>(inside) > share * static_cast<double>(probes_seen_)) {
        leave(row);
    }
}

void Walk::finish(std::int64_t r, RowFound& out) {
    Row& row = rows_[r];
    out.dense = row.dense;
    out.ids.clear();
    out.scores.clear();
    compact(row);
    std::sort(row.found.begin(), row.found.end(),
              [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
    for (const Candidate& found : row.found) {  // an outlier may be there twice
        const auto token = static_cast<std::int32_t>(found.token);
        if (out.ids.empty() || out.ids.back() != token) out.ids.push_back(token);
    }
    rescore(r, out);
    estimate_missed(r, out);
    bound_missed(r, out);
}

void Walk::rescore(std::int64_t r, RowFound& out) {
    const auto count = static_cast<std::int64_t>(out.ids.size());
    out.scores.resize(count);
    score_kernels().score[static_cast<int>(blocks_->geometry.dtype)](
        {*blocks_, item_.kv_head, query(r), 1, out.ids.data(), count, out.scores.data(), 0});
    nbytes_ += count * static_cast<std::int64_t>(blocks_->geometry.row_bytes());
    if (options_.k > 0) return keep_largest(r, out);
    float best = rows_[r].floor;
    for (const float score : out.scores) best = std::max(best, score);
    rows_[r].limit = best - options_.beta;
    std::int64_t kept = 0;
    for (std::int64_t t = 0; t < count; ++t) {
        if (out.scores[t] >= rows_[r].limit) {
            out.ids[kept] = out.ids[t];
            out.scores[kept++] = out.scores[t];
        }
    }
    out.ids.resize(kept);
    out.scores.resize(kept);
}

void Walk::keep_largest(std::int64_t r, RowFound& out) {
    const std::size_t count = out.ids.size(), k = std::min<std::size_t>(options_.k, count);
    std::vector<std::uint32_t> order(count);
    for (std::size_t t = 0; t < count; ++t) order[t] = static_cast<std::uint32_t>(t);
    std::nth_element(order.begin(), order.begin() + k, order.end(), [&](auto a, auto b) {
        return out.scores[a] != out.scores[b] ? out.scores[a] > out.scores[b] : a < b;
    });
    std::sort(order.begin(), order.begin() + k);
    for (std::size_t t = 0; t < k; ++t) {
        out.ids[t] = out.ids[order[t]];
        out.scores[t] = out.scores[order[t]];
    }
    out.ids.resize(k);
    out.scores.resize(k);
    if (k > 0) rows_[r].limit = *std::min_element(out.scores.begin(), out.scores.end());
}

// Every token not found as far along the query as a key can be.
void Walk::bound_missed(std::int64_t r, RowFound& out) const {
    const std::int64_t left = item_.visible - static_cast<std::int64_t>(out.ids.size());
    out.bound = kNone;
    if (left <= 0) return;
    const float* q = query(r);
    double square = 0;
    for (int i = 0; i < graph_->head_dim; ++i) square += double{q[i]} * q[i];
    const double most =
        lens_.highest[r] + std::sqrt(square) * double{probes_->radius[item_.kv_head]};
    out.bound = static_cast<float>(options_.scale * (most + 1e-5 * std::abs(most)) +
                                   std::log(static_cast<double>(left)) + 1e-5);
}

// From the random probes below the limit, each of which stands for as many tokens.
void Walk::estimate_missed(std::int64_t r, RowFound& out) {
    out.missed = kNone;
    if (static_cast<std::int64_t>(out.ids.size()) >= item_.visible) return;
    float* scores = probe_scores_.data() + r * probes_->count;
    float largest = kNone;
    for (std::int64_t t = 0; t < probes_->random; ++t) {
        if (!out.dense && scores[t] >= rows_[r].limit) scores[t] = kNone;
        largest = std::max(largest, scores[t]);
    }
    if (largest == kNone) return;
    const float sum = graph_kernels().mass(scores, probes_->random, largest, options_.scale);
    const auto each = static_cast<double>(item_.visible) / static_cast<double>(probes_seen_);
    out.missed =
        static_cast<float>(options_.scale * double{largest} + std::log(double{sum} * each));
}

}  // namespace kvdb::indexes
