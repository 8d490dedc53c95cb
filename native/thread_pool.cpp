#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "memory_nodes.h"
#include "usable_cpus.h"

namespace kvdb {
namespace {

constexpr std::int64_t kShares = 8;  // a thread takes this part of its share of the items at a time

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Pools are never destroyed: workers outlive static destructors. After a fork, the parent's mutexes
// may be locked for ever, so the child abandons the whole object.
std::atomic<ThreadPool*> foreground{nullptr};
std::atomic<ThreadPool*> background{nullptr};
thread_local bool in_background = false;
thread_local bool in_call = false;  // at the items of a call of several threads
thread_local bool in_series = false;

// Of both pools: workers that do not sleep, and calls and series of calls under way.
alignas(kApart) std::atomic<int> awake{0};
std::atomic<int> calls{0};

// Whether there is a processor for each that is awake, a caller between two calls among them.
bool may_spin() {
    return awake.load(std::memory_order_relaxed) +
               std::max(1, calls.load(std::memory_order_relaxed)) <=
           usable_cpus();
}

}  // namespace

void work_in_background() {
    in_background = true;
}

ThreadPool& ThreadPool::instance() {
    std::atomic<ThreadPool*>& current = in_background ? background : foreground;
    ThreadPool* pool = current.load(std::memory_order_acquire);
    if (pool) return *pool;
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
        foreground.store(nullptr);
        background.store(nullptr);
        awake.store(0);
        calls.store(0);
    });
    static_cast<void>(registered);
    auto* fresh = new ThreadPool;
    if (!current.compare_exchange_strong(pool, fresh)) {
        delete fresh;  // another thread was first; this one has no workers yet
        return *pool;
    }
    return *fresh;
}

// Whether `done` came true within the time of spinning, which is longer for those who wait for the
// next call of a series.
template <class Done>
bool ThreadPool::spin_until(Done&& done, bool waits_for_series) const {
    using Clock = std::chrono::steady_clock;
    const int spin_us = ThreadPool::spin_us();
    if (spin_us == 0) return done();
    const auto begin = Clock::now();
    for (; !done(); pause()) {
        const bool series = waits_for_series && series_.load(std::memory_order_relaxed) > 0;
        const std::chrono::microseconds most(series ? std::max(spin_us, kSeriesSpin) : spin_us);
        if (!may_spin() || Clock::now() - begin >= most) return false;
    }
    return true;
}

std::vector<ThreadPool::Counters> ThreadPool::counters() const {
    std::vector<Counters> all;
    for (int number = 0; number <= workers_.load(std::memory_order_acquire); ++number) {
        const Slot& slot = slots_[number];
        all.push_back({slot.jobs.load(std::memory_order_relaxed),
                       slot.items.load(std::memory_order_relaxed),
                       slot.woken.load(std::memory_order_relaxed),
                       slot.caught.load(std::memory_order_relaxed)});
    }
    return all;
}

void ThreadPool::run_job(Job& job) {
    job.threads = static_cast<int>(std::min<std::int64_t>(job.threads, job.items));
    if (job.threads <= 1 || in_call) {
        for (std::int64_t i = 0; i < job.items; ++i) job.call(job.context, i, 0);
        return;
    }
    start_workers(job.threads);
    const int call = in_series ? 0 : 1;  // a series counts for its calls
    calls.fetch_add(call, std::memory_order_relaxed);
    Post* post = offer(job);
    if (post) wake_next(job, 0);
    in_call = true;
    run_items(job, 0);
    in_call = false;
    if (post) withdraw(*post);
    calls.fetch_sub(call, std::memory_order_relaxed);
    if (job.error) std::rethrow_exception(job.error);
}

void ThreadPool::run_items(Job& job, int number) {
    std::int64_t done = 0;
    try {
        const std::int64_t shares = kShares * job.threads;
        std::int64_t begin = job.next.load(std::memory_order_relaxed);
        while (begin < job.items) {
            const std::int64_t end =
                begin + std::max<std::int64_t>(1, (job.items - begin) / shares);
            if (!job.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            for (std::int64_t i = begin; i < end; ++i) job.call(job.context, i, number);
            done += end - begin;
            begin = job.next.load(std::memory_order_relaxed);
        }
    } catch (...) {
        job.next.store(job.items, std::memory_order_relaxed);
        if (!job.failed.test_and_set()) job.error = std::current_exception();
    }
    slots_[number].jobs.fetch_add(done > 0, std::memory_order_relaxed);
    slots_[number].items.fetch_add(done, std::memory_order_relaxed);
}

// Where the workers find the job from now on; null if too many are offered already.
ThreadPool::Post* ThreadPool::offer(Job& job) {
    for (int i = 0; i < kPosts; ++i) {
        Post& post = posts_[i];
        if (post.taken.load(std::memory_order_relaxed) || post.taken.exchange(true)) continue;
        for (int used = posts_used_;
             used <= i && !posts_used_.compare_exchange_weak(used, i + 1);) {
        }
        post.job.store(&job);
        posted_.fetch_add(1);
        return &post;
    }
    return nullptr;
}

// Waits until no worker is at the job.
void ThreadPool::withdraw(Post& post) {
    post.job.store(nullptr);
    // Most often that is shorter than to sleep and wake.
    if (!spin_until([&] { return post.helpers.load() == 0; }, false)) {
        if (post.helpers.load() != 0) slots_[0].woken.fetch_add(1, std::memory_order_relaxed);
        for (int helpers; (helpers = post.helpers.load()) != 0;) post.helpers.wait(helpers);
    }
    post.taken.store(false);
}

void ThreadPool::start_workers(int threads) {
    if (workers_.load(std::memory_order_acquire) >= threads - 1) return;
    const std::lock_guard lock(starting_);
    try {
        for (int number; (number = workers_ + 1) < threads; ++workers_) {
            std::thread([this, number] { worker(number); }).detach();
        }
    } catch (const std::system_error&) {
        // The system grants no more threads, so the present ones do the work.
    }
}

// The workers form a tree: below the one in slot n are those in 2n + 1 and 2n + 2. Whoever is at
// work with another call is left there, and those below are woken in its place.
void ThreadPool::wake_next(const Job& job, int number) {
    const int end = std::min(job.threads, workers_.load(std::memory_order_acquire) + 1);
    for (int below = 2 * number + 1; below <= 2 * number + 2 && below < end; ++below) {
        if (job.next.load(std::memory_order_relaxed) >= job.items) return;
        if (wake(slots_[below]) == Slot::working) wake_next(job, below);
    }
}

// Wakes a worker that sleeps. Returns what it was doing.
int ThreadPool::wake(Slot& slot) {
    int state = Slot::asleep;
    if (slot.state.compare_exchange_strong(state, Slot::seeking)) {
        awake.fetch_add(1, std::memory_order_relaxed);
        slot.state.notify_one();
    }
    return state;
}

ThreadPool::Series::Series(int threads) {
    if (threads <= 1 || in_call || in_series) return;
    pool_ = &instance();
    in_series = true;
    calls.fetch_add(1, std::memory_order_relaxed);
    pool_->series_.fetch_add(1, std::memory_order_relaxed);
}

ThreadPool::Series::~Series() {
    if (!pool_) return;
    pool_->series_.fetch_sub(1, std::memory_order_relaxed);
    calls.fetch_sub(1, std::memory_order_relaxed);
    in_series = false;
}

// Joins a call that has items left; false if there is none.
bool ThreadPool::help(int number) {
    const int used = posts_used_.load();
    for (int i = 0; i < used; ++i) {
        Post& post = posts_[(i + number) % used];
        if (!post.job.load()) continue;
        post.helpers.fetch_add(1);
        Job* const job = post.job.load();  // from here on it stays until this worker has left
        const bool joins =
            job && number < job->threads && job->next.load(std::memory_order_relaxed) < job->items;
        if (joins) {
            slots_[number].state.store(Slot::working);
            wake_next(*job, number);
            run_items(*job, number);
            slots_[number].state.store(Slot::seeking);
        }
        if (post.helpers.fetch_sub(1) == 1) post.helpers.notify_one();
        if (joins) return true;
    }
    return false;
}

void ThreadPool::worker(int number) {
    in_call = true;
    awake.fetch_add(1, std::memory_order_relaxed);
    MemoryNodes::current().stay(number);
    for (;;) {
        const std::uint32_t seen = posted_.load();
        if (!help(number)) rest(number, seen);
    }
}

// Spins, then sleeps, until there may be a call that was offered after `seen` calls.
void ThreadPool::rest(int number, std::uint32_t seen) {
    Slot& slot = slots_[number];
    const auto posted = [&] { return posted_.load() != seen; };
    if (posted()) return;
    if (spin_until(posted, true)) {
        slot.caught.fetch_add(1, std::memory_order_relaxed);
        return;
    }
    awake.fetch_sub(1, std::memory_order_relaxed);
    slot.state.store(Slot::asleep);
    int asleep = Slot::asleep;
    // A call that came meanwhile may have been offered before this worker could be woken.
    if (posted() && slot.state.compare_exchange_strong(asleep, Slot::seeking)) {
        awake.fetch_add(1, std::memory_order_relaxed);
        return;
    }
    slot.state.wait(Slot::asleep);
    slot.woken.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace kvdb
