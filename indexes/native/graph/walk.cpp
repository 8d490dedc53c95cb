#include "walk.h"

#include <algorithm>

#include "answer.h"

namespace kvdb::indexes {

namespace {

constexpr int kBatch =
    8;  // tokens expanded together, so that their neighbours' codes come together
constexpr std::int64_t kScanned = 512;       // codes estimated together
constexpr std::int64_t kBudgetLeast = 2048;  // tokens that any walk may meet

}  // namespace

void Walk::run(const Task& task, RowFound* out) {
    task_ = &task;
    begin();
    if (task.visible > 0) {
        outliers();
        look_at_probes();
        if (task.options.scan) {
            scan();
        } else {
            start();
            task.options.listed ? walk_listed() : walk_best_first();
        }
    }
    scanned_ += static_cast<std::int64_t>(visited_.count());
    nbytes_ += scanned_ * task.graph.stride;
    for (int r = 0; r < task.heads; ++r) {
        if (!task.has(r)) continue;
        answer(task, r, ranges_[r], {probe_scores(r), probes_seen_, lens_.highest[r]}, out[r]);
        nbytes_ += static_cast<std::int64_t>(out[r].ids.size()) * task.key_nbytes();
    }
}

void Walk::begin() {
    const Graph& graph = task_->graph;
    const SearchOptions& options = task_->options;
    const auto share = double{options.budget} * static_cast<double>(task_->visible);
    budget_ = std::max(kBudgetLeast, static_cast<std::int64_t>(share)) + 8 * width_of(options.k);
    selective_ = 4 * task_->visible < 3 * graph.tokens;
    scanned_ = nbytes_ = probes_seen_ = 0;
    visited_.clear();
    steps_.clear();
    list_.clear();
    fresh_.clear();
    rest_.resize(graph.head_dim);
    probe_scores_.resize(task_->heads * task_->probes.count);
    lens_.resize(task_->heads, graph.stride);
    ranges_.resize(task_->heads);
    for (int r = 0; r < task_->heads; ++r) {
        lens_.set(r, graph, task_->kv_head, task_->q(r), rest_.data());
        const float floor = task_->queries.floor[task_->row(r)];
        ranges_[r].begin(options, floor, lens_.noise[r], !task_->has(r));
    }
}

void Walk::estimate(const std::uint8_t* codes, const std::uint32_t* tokens, std::int64_t count) {
    if (room_ < count || static_cast<std::int64_t>(scores_.size()) < task_->heads * room_) {
        room_ = std::max<std::int64_t>(count, 1024);
        scores_.resize(task_->heads * room_);
    }
    graph_kernels().estimate({codes, task_->graph.stride, tokens, count, lens_.bytes.data(),
                              lens_.factor.data(), lens_.bias.data(), task_->heads, scores_.data(),
                              room_});
}

void Walk::walk_best_first() {
    while (!steps_.empty()) {
        fresh_.clear();
        for (int taken = 0; taken < kBatch && !steps_.empty();) {
            std::pop_heap(steps_.begin(), steps_.end());
            const Step step = steps_.back();
            steps_.pop_back();
            if (!ranges_[step.row].wants(step.score)) continue;
            expand(step.token);
            ++taken;
        }
        meet();
    }
}

void Walk::walk_listed() {
    for (std::size_t at = 0; at < list_.size();) {
        fresh_.clear();
        for (int taken = 0; taken < kBatch && at < list_.size(); ++taken) expand(list_[at++]);
        meet();
        if (std::all_of(ranges_.begin(), ranges_.end(),
                        [](const Range& range) { return range.done(); })) {
            return;
        }
    }
}

void Walk::scan() {
    const QueryRows& queries = task_->queries;
    const std::int64_t end = queries.end[task_->query];
    for (std::int64_t at = queries.begin[task_->query]; at < end;) {
        fresh_.clear();
        for (; at < end && fresh_.size() < kScanned; ++at) {
            if (!queries.is_hidden(at)) fresh_.push_back(static_cast<std::uint32_t>(at));
        }
        const auto count = static_cast<std::int64_t>(fresh_.size());
        estimate(task_->code(0), fresh_.data(), count);
        for (int r = 0; r < task_->heads; ++r) {
            if (ranges_[r].done()) continue;
            for (std::int64_t t = 0; t < count; ++t) {
                if (score_at(r, t) >= ranges_[r].limit()) {
                    ranges_[r].offer(fresh_[t], score_at(r, t));
                }
            }
            if (ranges_[r].crowded()) check_density(r);
        }
        scanned_ += count;
    }
}

inline void Walk::take(std::uint32_t token) {
    if (!visited_.insert(token)) return;
    prefetch(task_->code(token), task_->graph.stride);
    fresh_.push_back(token);
}

void Walk::expand(std::uint32_t token) {
    const Graph& graph = task_->graph;
    const std::uint32_t* links = task_->links(token);
    nbytes_ += 4 * graph.degree;
    int count = 0;
    hidden_.clear();
    for (; count < graph.degree && links[count] < graph.tokens; ++count) {
        if (selective_ && !task_->sees(links[count])) hidden_.push_back(links[count]);
        take(links[count]);
    }
    if (2 * static_cast<int>(hidden_.size()) > count) {
        for (const std::uint32_t between : hidden_) expand_hidden(between);
    }
}

// Of the neighbours of a hidden token those that are not hidden.
void Walk::expand_hidden(std::uint32_t token) {
    const Graph& graph = task_->graph;
    const std::uint32_t* links = task_->links(token);
    nbytes_ += 4 * graph.degree;
    for (int j = 0; j < graph.degree && links[j] < graph.tokens; ++j) {
        if (task_->sees(links[j])) take(links[j]);
    }
}

// Looks at the tokens that were taken.
void Walk::meet() {
    const auto count = static_cast<std::int64_t>(fresh_.size());
    if (count == 0) return;
    estimate(task_->code(0), fresh_.data(), count);
    const float* margins = measure_margins(count);
    for (std::int64_t t = 0; t < count; ++t) {
        if (margins[t] >= 0) {
            push(fresh_[t], t);
        } else if (static_cast<std::int64_t>(list_.size()) < task_->options.least) {
            list_.push_back(fresh_[t]);
        }
    }
    for (int r = 0; r < task_->heads; ++r) {
        if (ranges_[r].crowded()) check_density(r);
    }
    if (static_cast<std::int64_t>(visited_.count()) > budget_) stop();
}

// How far the scores lie above what some row may want of them: most tokens are told apart here,
// without a branch.
const float* Walk::measure_margins(std::int64_t count) {
    margins_.assign(count, kNone);
    for (int r = 0; r < task_->heads; ++r) {
        if (ranges_[r].done()) continue;
        const float least = ranges_[r].least();
        const float* scores = scores_.data() + r * room_;
        float* margins = margins_.data();
        for (std::int64_t t = 0; t < count; ++t) {
            margins[t] = std::max(margins[t], scores[t] - least);
        }
    }
    return margins_.data();
}

// A token whose scores stand at `at`: it may be found, and it may be a step of the walk.
void Walk::push(std::uint32_t token, std::int64_t at) {
    float margin = kNone;
    std::int64_t nearest = 0;
    for (int r = 0; r < task_->heads; ++r) {
        Range& range = ranges_[r];
        if (range.done()) continue;
        const float score = score_at(r, at);
        if (score >= range.limit() && task_->sees(token)) range.offer(token, score);
        range.meet(score);
        if (range.leads(score) && score - range.limit() > margin) {
            margin = score - range.limit();
            nearest = r;
        }
    }
    if (margin > kNone) push_step(margin, score_at(nearest, at), token, nearest);
}

void Walk::push_step(float margin, float score, std::uint32_t token, std::int64_t r) {
    prefetch(task_->links(token), 4 * task_->graph.degree);
    if (task_->options.listed) {
        list_.push_back(token);
    } else {
        steps_.push_back({margin, score, token, static_cast<std::uint32_t>(r)});
        std::push_heap(steps_.begin(), steps_.end());
    }
}

// The random probes tell whether a range that seems full is.
void Walk::check_density(std::int64_t r) {
    Range& range = ranges_[r];
    const std::int64_t have = range.compact();
    range.check_again_beyond(std::max(2 * have, kDenseCheck));
    if (task_->options.scan || task_->options.k > 0 || have < kDenseCheck) return;
    const float* scores = probe_scores(r);
    const auto inside = std::count_if(scores, scores + task_->probes.random,
                                      [&](float score) { return score >= range.limit(); });
    const auto share = static_cast<double>(task_->options.dense_share);
    if (static_cast<double>(have) > share * static_cast<double>(task_->visible) ||
        static_cast<double>(inside) > share * static_cast<double>(probes_seen_)) {
        range.leave();
    }
}

// The walk has met too much: rows that want much are left; when that does not end it, all are.
void Walk::stop() {
    bool any = false;
    for (Range& range : ranges_) {
        if (range.done() || range.compact() < kDenseCheck) continue;
        range.leave();
        any = true;
    }
    for (Range& range : ranges_) {
        if (!any && !range.done()) range.leave();
    }
    budget_ += budget_ / 4;
}

}  // namespace kvdb::indexes
