// A few persistent threads that help whoever calls.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>
#include <vector>

namespace kvdb {

// Calls may come from any number of threads at once: each caller works on its own items, idle
// workers join whichever call still has items. So no call ever waits for another one. After a fork
// the child starts with a fresh pool.
class ThreadPool {
  public:
    static ThreadPool& instance();

    // Threads that one call may use, the caller included.
    int threads() const { return threads_.load(std::memory_order_relaxed); }
    void set_threads(int threads);  // [1, kThreadsMax], else std::invalid_argument

    // body(item, slot) for every item in [0, items). Calls that run at the same time have different
    // slots in [0, threads). The first exception is rethrown when all items are done or dropped.
    template <class Body>
    void run(std::int64_t items, int threads, Body&& body) {
        Job job;
        job.items = items;
        job.threads = threads;
        job.context = const_cast<void*>(static_cast<const void*>(&body));
        job.call = [](void* context, std::int64_t item, int slot) {
            (*static_cast<std::remove_reference_t<Body>*>(context))(item, slot);
        };
        run_job(job);
    }

    static constexpr int kThreadsMax = 1024;

  private:
    struct Job {
        std::int64_t items = 0;
        int threads = 1;
        void* context = nullptr;
        void (*call)(void*, std::int64_t, int) = nullptr;
        std::atomic<std::int64_t> next{0};
        std::atomic<int> helpers{0};  // workers inside; changed under the pool's mutex
        std::exception_ptr error;     // guarded by it
    };

    explicit ThreadPool(int threads) : threads_(threads) {}
    void run_job(Job& job);
    void work(Job& job, int slot);
    void start_workers(int threads);
    void worker(int slot);
    Job* joinable(int slot);

    std::atomic<int> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable left_;
    std::vector<Job*> jobs_;  // with items that nobody has taken
    int workers_ = 0;
    std::atomic<std::uint32_t> posted_{0};  // counts jobs, for workers that spin
};

}  // namespace kvdb
