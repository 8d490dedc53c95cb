// A few persistent threads that help whoever calls: one pool for the whole process, and a second
// one for background work.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>
#include <vector>

#include "cache_line.h"
#include "export.h"

namespace kvdb {

// From now on, calls from this thread run on the background pool. Its workers are started only by
// such threads and so, on Linux, have their priority; the workers of the other pool have the
// priority of its callers.
KVDB_BASE void work_in_background();

// Calls may come from any number of threads at once: each caller works on its own items, idle
// workers join whichever call still has items. So no call ever waits for another one. After a fork
// the child starts with fresh pools.
//
// A caller wakes two workers, and each worker that joins wakes two more while there are items
// nobody has taken, so that waking a hundred takes as long as waking seven in a row, and no worker
// is woken for nothing. Joining and leaving a call take one atomic addition each, no lock.
class KVDB_BASE ThreadPool {
  public:
    // The pool of the calling thread: the foreground one, or the background one.
    static ThreadPool& instance();

    // Threads that one call may use, the caller included. The same number for both pools. At first
    // that of KVDB_THREADS, else of the processors that this process may use.
    static int threads();
    static void set_threads(int threads);  // [1, kThreadsMax], else std::invalid_argument

    // Microseconds that a thread without work spins before it sleeps. The same for both pools.
    // While more threads are awake than there are processors, none spins: it would keep others from
    // working.
    static int spin_us();
    static void set_spin_us(int microseconds);  // [0, kSpinMax], else std::invalid_argument

    // body(item, slot) for every item in [0, items). Calls that run at the same time have different
    // slots in [0, threads). The first exception is rethrown when all items are done or dropped.
    // Within an item of a call of several threads the thread works alone: all are busy already.
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

    // Calls of this thread that follow each other, as long as it lives. Workers that were awake for
    // one of them wait awake for the next, for kSeriesSpin at most, so that each is woken once.
    // threads: how many the calls may use. A series in a series is a part of it.
    class KVDB_BASE Series {
      public:
        explicit Series(int threads);
        Series(const Series&) = delete;
        Series& operator=(const Series&) = delete;
        ~Series();

      private:
        ThreadPool* pool_ = nullptr;  // null where it does nothing
    };

    // What the threads of one slot have done: calls of several threads they took part in, items of
    // these, how often they were woken from sleep, and how often they met work while they spun. The
    // first slot, of all callers, was woken by the last worker that it waited for.
    struct Counters {
        std::int64_t jobs, items, woken, caught;
    };
    std::vector<Counters> counters() const;  // of each slot

    static constexpr int kThreadsMax = 1024;
    static constexpr int kSpinMax = 1'000'000;
    static constexpr int kSeriesSpin = 200;  // microseconds: a caller that is busy by itself for
                                             // longer has to wake its workers again

  private:
    struct Job {
        std::int64_t items = 0;
        int threads = 1;
        void* context = nullptr;
        void (*call)(void*, std::int64_t, int) = nullptr;
        std::atomic_flag failed;
        std::exception_ptr error;  // written by whoever set `failed`
        alignas(kApart) std::atomic<std::int64_t> next{0};
    };

    // Where a call is offered. It belongs to the pool, so that a worker can say that it comes
    // before it knows whether the call is still there.
    struct alignas(kApart) Post {
        std::atomic<bool> taken{false};
        std::atomic<Job*> job{nullptr};
        alignas(kApart) std::atomic<int> helpers{0};  // workers inside, or looking
    };

    struct alignas(kApart) Slot {
        enum State : int { seeking, working, asleep };
        std::atomic<int> state{seeking};
        std::atomic<std::int64_t> jobs{0}, items{0}, woken{0}, caught{0};
    };

    static constexpr int kPosts = 64;  // calls with helpers at a time; more do without

    ThreadPool() = default;
    void run_job(Job& job);
    void run_items(Job& job, int number);
    Post* offer(Job& job);
    void withdraw(Post& post);
    template <class Done>
    bool spin_until(Done&& done, bool waits_for_series) const;
    void start_workers(int threads);
    void wake_next(const Job& job, int number);
    static int wake(Slot& slot);
    void worker(int number);
    bool help(int number);
    void rest(int number, std::uint32_t seen);

    std::array<Post, kPosts> posts_;
    std::array<Slot, kThreadsMax> slots_;  // the first of all callers, then one for each worker
    alignas(kApart) std::atomic<int> posts_used_{0};  // at most so many were offered at a time
    std::atomic<int> workers_{0};
    std::atomic<int> series_{0};                            // under way
    alignas(kApart) std::atomic<std::uint32_t> posted_{0};  // counts calls, for workers that spin
    std::mutex starting_;
};

}  // namespace kvdb
