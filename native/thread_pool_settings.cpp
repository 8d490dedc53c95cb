// How many threads calls may use, and how long those without work spin.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "thread_pool.h"
#include "usable_cpus.h"

namespace kvdb {
namespace {

constexpr int kSpinDefault = 50;  // microseconds; docs/decisions/005 shows that less does not pay

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
    if (!text || !*text) return std::min(usable_cpus(), ThreadPool::kThreadsMax);
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

std::atomic<int>& spin_time() {
    static std::atomic<int> microseconds{kSpinDefault};
    return microseconds;
}

}  // namespace

int ThreadPool::threads() {
    return thread_count().load(std::memory_order_relaxed);
}

void ThreadPool::set_threads(int threads) {
    thread_count() = checked(threads, 1, kThreadsMax, "threads");
}

int ThreadPool::spin_us() {
    return spin_time().load(std::memory_order_relaxed);
}

void ThreadPool::set_spin_us(int microseconds) {
    spin_time() = checked(microseconds, 0, kSpinMax, "spin");
}

}  // namespace kvdb
