#include "beam_search.h"

#include <algorithm>

#include "rerank.h"

namespace kvdb::indexes::graph {

namespace {

constexpr int kBatch =
    8;  // tokens expanded together, so that their neighbours' codes come together
constexpr std::int64_t kScanned = 512;       // codes estimated together
constexpr std::int64_t kBudgetLeast = 2048;  // tokens that any search may score

}  // namespace

void BeamSearch::run(const QueryGroup& group, RowResult* out) {
    group_ = &group;
    begin();
    if (group.visible > 0) {
        score_probes();
        score_outliers();
        if (group.scan) {
            scan();
        } else {
            seed_frontier();
            group.options.listed ? search_listed() : search_best_first();
        }
    }
    scanned_ += static_cast<std::int64_t>(visited_.count());
    nbytes_ += scanned_ * group.graph.stride;
    for (int r = 0; r < group.heads; ++r) {
        if (!group.has(r)) continue;
        rerank(group, r, ranges_[r], {probe_scores(r), probes_seen_, quantized_.highest[r]},
               out[r]);
        nbytes_ += static_cast<std::int64_t>(out[r].ids.size()) * group.key_nbytes();
    }
}

void BeamSearch::begin() {
    const Graph& graph = group_->graph;
    const GraphOptions& options = group_->options;
    const auto share = double{options.budget} * static_cast<double>(group_->visible);
    budget_ = std::max(kBudgetLeast, static_cast<std::int64_t>(share)) + 8 * width_of(options.k);
    selective_ = 4 * group_->visible < 3 * graph.tokens;
    scanned_ = nbytes_ = probes_seen_ = 0;
    visited_.clear();
    frontier_.clear();
    list_.clear();
    fresh_.clear();
    rest_.resize(graph.head_dim);
    unmet_.resize(graph.degree);
    probe_scores_.resize(group_->heads * group_->probes.count);
    quantized_.resize(group_->heads, graph.stride);
    ranges_.resize(group_->heads);
    for (int r = 0; r < group_->heads; ++r) {
        quantized_.quantize(r, graph, group_->kv_head, group_->q(r), rest_.data());
        const float floor = group_->queries.floor[group_->row(r)];
        ranges_[r].begin(options, floor, quantized_.noise[r], !group_->has(r));
    }
}

void BeamSearch::make_room(std::int64_t count) {
    if (room_ < count || static_cast<std::int64_t>(scores_.size()) < group_->heads * room_) {
        room_ = std::max<std::int64_t>(count, 1024);
        scores_.resize(group_->heads * room_);
    }
}

// The estimates of tokens, all of the graph's, for all rows, into `scores_`.
void BeamSearch::estimate(const std::vector<std::uint32_t>& tokens) {
    const Graph& graph = group_->graph;
    const auto count = static_cast<std::int64_t>(tokens.size());
    make_room(count);
    graph_kernels().estimate({group_->code(0), graph.stride, graph.code_step, tokens.data(), count,
                              quantized_.bytes.data(), quantized_.factor.data(),
                              quantized_.bias.data(), group_->heads, scores_.data(), room_});
}

// The estimates of codes that lie together.
void BeamSearch::estimate_in_order(const std::uint8_t* codes, std::int64_t count, float* out,
                                   std::int64_t out_stride) {
    const std::int64_t stride = group_->graph.stride;
    graph_kernels().estimate({codes, stride, stride, nullptr, count, quantized_.bytes.data(),
                              quantized_.factor.data(), quantized_.bias.data(), group_->heads, out,
                              out_stride});
}

void BeamSearch::search_best_first() {
    while (!frontier_.empty()) {
        fresh_.clear();
        for (int taken = 0; taken < kBatch && !frontier_.empty();) {
            std::pop_heap(frontier_.begin(), frontier_.end());
            const FrontierToken next = frontier_.back();
            frontier_.pop_back();
            if (!ranges_[next.row].worth_expanding(next.score)) continue;
            expand(next.token);
            ++taken;
        }
        score_fresh();
    }
}

void BeamSearch::search_listed() {
    for (std::size_t at = 0; at < list_.size();) {
        fresh_.clear();
        for (int taken = 0; taken < kBatch && at < list_.size(); ++taken) expand(list_[at++]);
        score_fresh();
        if (std::all_of(ranges_.begin(), ranges_.end(),
                        [](const Range& range) { return range.done(); })) {
            return;
        }
    }
}

void BeamSearch::scan() {
    const QueryRows& queries = group_->queries;
    const std::int64_t end = queries.end[group_->query];
    for (std::int64_t at = queries.begin[group_->query]; at < end;) {
        fresh_.clear();
        for (; at < end && fresh_.size() < kScanned; ++at) {
            if (!queries.is_hidden(at)) fresh_.push_back(static_cast<std::uint32_t>(at));
        }
        const auto count = static_cast<std::int64_t>(fresh_.size());
        estimate(fresh_);
        for (int r = 0; r < group_->heads; ++r) {
            if (ranges_[r].done()) continue;
            for (std::int64_t t = 0; t < count; ++t) {
                if (score_at(r, t) >= ranges_[r].limit()) {
                    ranges_[r].add(fresh_[t], score_at(r, t));
                }
            }
            if (ranges_[r].check_due()) check_density(r);
        }
        scanned_ += count;
    }
}

inline void BeamSearch::visit(std::uint32_t token) {
    if (!visited_.insert(token)) return;
    prefetch(group_->code(token), group_->graph.stride);
    fresh_.push_back(token);
}

void BeamSearch::expand(std::uint32_t token) {
    const Graph& graph = group_->graph;
    const std::uint32_t* links = group_->links(token);
    nbytes_ += 4 * graph.degree;
    int count = 0;
    while (count < graph.degree && links[count] < graph.tokens) ++count;
    hidden_.clear();
    for (int j = 0; j < count && selective_; ++j) {
        if (!group_->sees(links[j])) hidden_.push_back(links[j]);
    }
    // Most neighbours were met before. Which ones cannot be predicted, so these are left out
    // without a branch.
    int left = 0;
    for (int j = 0; j < count; ++j) {
        unmet_[left] = links[j];
        left += !visited_.surely_holds(links[j]);
    }
    for (int j = 0; j < left; ++j) visit(unmet_[j]);
    if (2 * static_cast<int>(hidden_.size()) > count) {
        for (const std::uint32_t between : hidden_) expand_hidden(between);
    }
}

// Visits the neighbours of a hidden token that are not hidden.
void BeamSearch::expand_hidden(std::uint32_t token) {
    const Graph& graph = group_->graph;
    const std::uint32_t* links = group_->links(token);
    nbytes_ += 4 * graph.degree;
    for (int j = 0; j < graph.degree && links[j] < graph.tokens; ++j) {
        if (group_->sees(links[j])) visit(links[j]);
    }
}

// Scores the tokens that were visited since the last call.
void BeamSearch::score_fresh() {
    const auto count = static_cast<std::int64_t>(fresh_.size());
    if (count == 0) return;
    estimate(fresh_);
    const float* margins = measure_margins(count);
    for (std::int64_t t = 0; t < count; ++t) {
        if (margins[t] >= 0) {
            push(fresh_[t], t);
        } else if (static_cast<std::int64_t>(list_.size()) < group_->options.least) {
            list_.push_back(fresh_[t]);
        }
    }
    for (int r = 0; r < group_->heads; ++r) {
        if (ranges_[r].check_due()) check_density(r);
    }
    if (static_cast<std::int64_t>(visited_.count()) > budget_) stop();
}

// How far each score lies above the lowest that some row accepts: most tokens are rejected here,
// without a branch.
const float* BeamSearch::measure_margins(std::int64_t count) {
    margins_.assign(count, kNone);
    for (int r = 0; r < group_->heads; ++r) {
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

// Adds a token whose scores stand at `at` to the candidates, the frontier, or both.
void BeamSearch::push(std::uint32_t token, std::int64_t at) {
    float margin = kNone;
    std::int64_t nearest = 0;
    for (int r = 0; r < group_->heads; ++r) {
        Range& range = ranges_[r];
        if (range.done()) continue;
        const float score = score_at(r, at);
        if (score >= range.limit() && group_->sees(token)) range.add(token, score);
        range.see(score);
        if (range.worth_queueing(score) && score - range.limit() > margin) {
            margin = score - range.limit();
            nearest = r;
        }
    }
    if (margin > kNone) push_frontier(margin, score_at(nearest, at), token, nearest);
}

void BeamSearch::push_frontier(float margin, float score, std::uint32_t token, std::int64_t r) {
    prefetch(group_->links(token), 4 * group_->graph.degree);
    if (group_->options.listed) {
        list_.push_back(token);
    } else {
        frontier_.push_back({margin, score, token, static_cast<std::uint32_t>(r)});
        std::push_heap(frontier_.begin(), frontier_.end());
    }
}

// The random probes decide whether a range that seems too full really is.
void BeamSearch::check_density(std::int64_t r) {
    Range& range = ranges_[r];
    const std::int64_t have = range.compact();
    range.check_again_beyond(std::max(2 * have, kDenseCheck));
    if (group_->scan || group_->options.k > 0 || have < kDenseCheck) return;
    const float* scores = probe_scores(r);
    const auto inside = std::count_if(scores, scores + group_->probes.random,
                                      [&](float score) { return score >= range.limit(); });
    const auto share = static_cast<double>(group_->options.dense_share);
    if (static_cast<double>(have) > share * static_cast<double>(group_->visible) ||
        static_cast<double>(inside) > share * static_cast<double>(probes_seen_)) {
        range.give_up_row();
    }
}

// The search has scored too much: rows with many candidates give up; if there are none, all do.
void BeamSearch::stop() {
    bool any = false;
    for (Range& range : ranges_) {
        if (range.done() || range.compact() < kDenseCheck) continue;
        range.give_up_row();
        any = true;
    }
    for (Range& range : ranges_) {
        if (!any && !range.done()) range.give_up_row();
    }
    budget_ += budget_ / 4;
}

}  // namespace kvdb::indexes::graph
