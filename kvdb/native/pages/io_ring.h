// Reads that the system carries out many at a time for one thread: an io_uring, by its system calls
// alone, so that nothing is needed to build it but the kernel's header and nothing at all to run.
#pragma once

#include <cstdint>
#include <memory>

namespace kvdb {

// Bytes [at, at + nbytes) of a file, and where they go.
struct FileRead {
    std::uint64_t at;
    std::uint64_t address;
    std::uint32_t nbytes;
};

// One queue of reads. Not thread-safe: whoever uses it has borrowed it.
class IoRing {
  public:
    static constexpr unsigned kDepth = 128;  // measured: a quarter more than 64, as much as 256

    // A ring that nobody uses, kept from an earlier call or new; empty where the system has none,
    // which is asked once. It goes back by itself.
    struct GiveBack {
        void operator()(IoRing* ring) const;
    };
    using Borrowed = std::unique_ptr<IoRing, GiveBack>;
    static Borrowed borrow();

    IoRing(const IoRing&) = delete;
    IoRing& operator=(const IoRing&) = delete;
    ~IoRing();

    // Room for one more: at most kDepth are under way.
    bool full() const;
    unsigned under_way() const { return under_way_; }

    // Add a read. The memory belongs to the system until its end has been taken. tag: comes back
    // with it.
    void add(int file, const FileRead& read, std::uint64_t tag);

    // Hand over what was added, wait until some reads have ended, and call
    // ended(tag, bytes read or minus the number of the error) for each of them.
    template <class Ended>
    void wait(Ended&& ended) {
        enter();
        std::uint64_t tag;
        std::int32_t result;
        while (take(tag, result)) ended(tag, result);
    }

  private:
    struct Queues;

    IoRing();
    void enter();
    bool take(std::uint64_t& tag, std::int32_t& result);

    int ring_ = -1;
    bool refused_ = true;  // for good, and not because memory or descriptors are short for once
    unsigned added_ = 0;   // and not handed over yet
    unsigned under_way_ = 0;
    std::unique_ptr<Queues> queues_;
};

}  // namespace kvdb
