// A few persistent threads that help whoever calls: one pool for the whole process, and a second
// one for background work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>
#include <vector>

#include "export.h"

namespace kvdb {

// From now on, calls from this thread run on the background pool. Its workers are started only by
// such threads and so, on Linux, have their priority; the workers of the other pool have the
// priority of its callers.
KVDB_BASE void work_in_background();

// Calls may come from any number of threads at once: each caller works on its own items, idle
// workers join whichever call still has items. So no call ever waits for another one. After a fork
// the child starts with fresh pools.
class KVDB_BASE ThreadPool {
  public:
    // The pool of the calling thread: the foreground one, or the background one.
    static ThreadPool& instance();

    // Threads that one call may use, the caller included. The same number for both pools.
    static int threads();
    static void set_threads(int threads);  // [1, kThreadsMax], else std::invalid_argument

    // Microseconds that a thread without work spins before it sleeps. The same for both pools.
    static int spin_us();
    static void set_spin_us(int microseconds);  // [0, kSpinMax], else std::invalid_argument

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
    static constexpr int kSpinMax = 1'000'000;

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

    ThreadPool() = default;
    void run_job(Job& job);
    void run_items(Job& job, int slot);
    void start_workers(int threads);
    void worker(int slot);
    Job* joinable(int slot);

    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable left_;
    std::vector<Job*> jobs_;  // with items that nobody has taken
    int workers_ = 0;
    std::atomic<std::uint32_t> posted_{0};  // counts jobs, for workers that spin
};

}  // namespace kvdb
