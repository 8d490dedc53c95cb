#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "background.h"

namespace kvdb {
namespace {

// About 20 us: the pause between the layers of a model, and much less than a scheduler's tick.
constexpr int kSpins = 500;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int available_cpus() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
    return std::max(1u, std::thread::hardware_concurrency());
}

int checked(long threads, const char* where) {
    if (threads < 1 || threads > ThreadPool::kThreadsMax) {
        throw std::invalid_argument(std::string(where) + " is " + std::to_string(threads) +
                                    "; expected 1 to " + std::to_string(ThreadPool::kThreadsMax));
    }
    return static_cast<int>(threads);
}

int default_threads() {
    const char* text = std::getenv("KVDB_THREADS");
    if (!text || !*text) return available_cpus();
    char* end = nullptr;
    const long threads = std::strtol(text, &end, 10);
    if (*end) {
        throw std::invalid_argument(std::string("KVDB_THREADS is '") + text +
                                    "'; expected a number of threads");
    }
    return checked(threads, "KVDB_THREADS");
}

// Never destroyed: workers outlive static destructors, and after a fork the parent's mutexes may be
// locked for ever, so that the child abandons the whole object.
std::atomic<ThreadPool*> foreground{nullptr};
std::atomic<ThreadPool*> background{nullptr};
std::atomic<int> wanted{0};
thread_local bool in_background = false;

}  // namespace

void work_in_background() {
    in_background = true;
}

ThreadPool& ThreadPool::instance() {
    std::atomic<ThreadPool*>& current = in_background ? background : foreground;
    ThreadPool* pool = current.load(std::memory_order_acquire);
    if (pool) return *pool;
    static const int initial = [] {
        pthread_atfork(nullptr, nullptr, [] {
            foreground.store(nullptr);
            background.store(nullptr);
        });
        return default_threads();
    }();
    int threads = wanted.load();
    if (threads == 0) threads = initial;
    auto* fresh = new ThreadPool(threads);
    if (!current.compare_exchange_strong(pool, fresh)) {
        delete fresh;  // another thread was first; this one has no workers yet
        return *pool;
    }
    return *fresh;
}

void ThreadPool::set_threads(int threads) {
    threads_ = checked(threads, "threads");
    wanted = threads;
}

void ThreadPool::run_job(Job& job) {
    job.threads = static_cast<int>(std::min<std::int64_t>(job.threads, job.items));
    if (job.threads <= 1) {
        for (std::int64_t i = 0; i < job.items; ++i) job.call(job.context, i, 0);
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        start_workers(job.threads);
        jobs_.push_back(&job);
        posted_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work(job, 0);

    std::unique_lock lock(mutex_);
    std::erase(jobs_, &job);
    if (job.helpers > 0) {  // most often for less than it takes to sleep and wake
        lock.unlock();
        for (int i = 0; i < kSpins && job.helpers > 0; ++i) pause();
        lock.lock();
    }
    left_.wait(lock, [&] { return job.helpers == 0; });
    if (job.error) std::rethrow_exception(job.error);
}

void ThreadPool::work(Job& job, int slot) {
    try {
        for (std::int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.items;) {
            job.call(job.context, i, slot);
        }
    } catch (...) {
        job.next.store(job.items, std::memory_order_relaxed);
        const std::lock_guard lock(mutex_);
        if (!job.error) job.error = std::current_exception();
    }
}

void ThreadPool::start_workers(int threads) {
    try {
        for (; workers_ < threads - 1; ++workers_) {
            std::thread([this, slot = workers_ + 1] { worker(slot); }).detach();
        }
    } catch (const std::system_error&) {
        // The system grants no more threads: those that there are do the work.
    }
}

ThreadPool::Job* ThreadPool::joinable(int slot) {
    for (Job* job : jobs_) {
        if (slot < job->threads && job->next.load(std::memory_order_relaxed) < job->items)
            return job;
    }
    return nullptr;
}

void ThreadPool::worker(int slot) {
    std::unique_lock lock(mutex_);
    for (;;) {
        if (Job* job = joinable(slot)) {
            ++job->helpers;
            lock.unlock();
            work(*job, slot);
            lock.lock();
            if (--job->helpers == 0) left_.notify_all();
            continue;
        }
        const std::uint32_t seen = posted_.load(std::memory_order_acquire);
        lock.unlock();
        for (int i = 0; i < kSpins && posted_.load(std::memory_order_acquire) == seen; ++i) pause();
        lock.lock();
        if (posted_.load(std::memory_order_acquire) == seen) {
            wake_.wait(lock, [&] { return posted_.load(std::memory_order_acquire) != seen; });
        }
    }
}

}  // namespace kvdb
