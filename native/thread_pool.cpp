#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

namespace kvdb {
namespace {

constexpr int kSpinDefault = 50;  // microseconds; benchmarks/wake.py shows that less does not pay

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int available_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int checked(long value, int least, int most, const char* name) {
    if (value < least || value > most) {
        throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                    "; expected " + std::to_string(least) + " to " +
                                    std::to_string(most));
    }
    return static_cast<int>(value);
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
    return checked(threads, 1, ThreadPool::kThreadsMax, "KVDB_THREADS");
}

std::atomic<int>& thread_count() {
    static std::atomic<int> threads{default_threads()};
    return threads;
}

// Pools are never destroyed: workers outlive static destructors. After a fork, the parent's mutexes
// may be locked for ever, so the child abandons the whole object.
std::atomic<ThreadPool*> foreground{nullptr};
std::atomic<ThreadPool*> background{nullptr};
std::atomic<int> spin{kSpinDefault};
thread_local bool in_background = false;

// Whether `done` came true within the time of spinning.
template <class Done>
bool spin_until(Done&& done) {
    using Clock = std::chrono::steady_clock;
    const int spin_us = spin.load(std::memory_order_relaxed);
    if (spin_us == 0) return done();
    for (const auto end = Clock::now() + std::chrono::microseconds(spin_us); !done(); pause()) {
        if (Clock::now() >= end) return false;
    }
    return true;
}

}  // namespace

void work_in_background() {
    in_background = true;
}

int ThreadPool::threads() {
    return thread_count().load(std::memory_order_relaxed);
}

void ThreadPool::set_threads(int threads) {
    thread_count() = checked(threads, 1, kThreadsMax, "threads");
}

int ThreadPool::spin_us() {
    return spin.load(std::memory_order_relaxed);
}

void ThreadPool::set_spin_us(int microseconds) {
    spin = checked(microseconds, 0, kSpinMax, "spin");
}

ThreadPool& ThreadPool::instance() {
    std::atomic<ThreadPool*>& current = in_background ? background : foreground;
    ThreadPool* pool = current.load(std::memory_order_acquire);
    if (pool) return *pool;
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
        foreground.store(nullptr);
        background.store(nullptr);
    });
    static_cast<void>(registered);
    auto* fresh = new ThreadPool;
    if (!current.compare_exchange_strong(pool, fresh)) {
        delete fresh;  // another thread was first; this one has no workers yet
        return *pool;
    }
    return *fresh;
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
    run_items(job, 0);

    std::unique_lock lock(mutex_);
    std::erase(jobs_, &job);
    if (job.helpers > 0) {  // most often for less than it takes to sleep and wake
        lock.unlock();
        spin_until([&] { return job.helpers == 0; });
        lock.lock();
    }
    left_.wait(lock, [&] { return job.helpers == 0; });
    if (job.error) std::rethrow_exception(job.error);
}

void ThreadPool::run_items(Job& job, int slot) {
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
        // The system grants no more threads, so the present ones do the work.
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
            run_items(*job, slot);
            lock.lock();
            if (--job->helpers == 0) left_.notify_all();
            continue;
        }
        const std::uint32_t seen = posted_.load(std::memory_order_acquire);
        const auto posted = [&] { return posted_.load(std::memory_order_acquire) != seen; };
        lock.unlock();
        spin_until(posted);
        lock.lock();
        wake_.wait(lock, posted);
    }
}

}  // namespace kvdb
