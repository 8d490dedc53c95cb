// The layers of segments that do not fit into memory together: their pages come when they are asked
// for, and go when others need the room.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "paged_memory.h"

namespace kvdb {

class LayerPages;

// The memory that the pages of all layers take together. Thread-safe.
class PagePool {
  public:
    // Bytes that pages may take; fewer than they take already become those. Returns what holds now.
    std::int64_t set_limit(std::int64_t nbytes);
    std::int64_t nbytes() const;  // taken by pages that are there or on their way

    // Has pages go that take so many bytes, of layers that nobody reads; returns the bytes that
    // went.
    std::int64_t shrink(std::int64_t nbytes);

  private:
    friend class LayerPages;

    bool make_room(std::int64_t nbytes);  // with the mutex held, as what follows
    std::int64_t sweep(std::int64_t nbytes);

    mutable std::mutex mutex_;
    std::condition_variable ended_;  // of some pages' way
    std::vector<LayerPages*> layers_;
    std::size_t next_ = 0;  // layer that is swept next
    std::int64_t limit_ = 0, taken_ = 0;
};

// Fills pages of kFilePage bytes at these addresses from these offsets. Throws PageError.
using ReadPages =
    std::function<void(const std::vector<std::uint64_t>&, const std::vector<std::uint64_t>&)>;

// Where the bytes of a layer stand in a file, and their checksums. A unit is what is read alone.
struct LayerPlace {
    std::string file;
    std::int64_t file_nbytes;  // in all, as it was written
    std::int64_t at;
    int layer;                        // for messages, as
    std::int64_t block_nbytes;        //
    std::int64_t sum_nbytes;          // bytes that one checksum is of
    std::vector<std::uint32_t> sums;  // CRC-32C
    ReadPages read = {};              // what reads it where `file` is only its name, or empty
};

// What searches of a layer had to wait for, since it was opened.
struct PageWaits {
    std::int64_t pages = 0;    // that they had read
    std::int64_t batches = 0;  // in which they were read
    double seconds = 0;        // that they waited for these, or for pages that others read, each
};

// The pages of one layer. Those that go are zeros when they are read, so whoever reads has pinned
// these, and has asked for what it reads. Thread-safe.
class LayerPages final : public PagedMemory {
  public:
    // Memory from `begin` on, of whole pages, which nobody else changes; the pool outlives it.
    LayerPages(PagePool& pool, std::uint64_t begin, std::int64_t nbytes, std::int64_t unit_nbytes,
               LayerPlace place);
    ~LayerPages() override;

    // Units that go only once nothing else of any layer that nobody reads can go.
    void prefer(const std::vector<std::int32_t>& units);

    void pin();  // nothing of it goes until as many `unpin`
    void unpin();
    std::int32_t units() const { return units_; }
    std::int64_t nbytes() const;            // taken by pages that are there or on their way
    std::int64_t missing_nbytes() const;    // of the others
    std::int64_t preferred_nbytes() const;  // taken by those that are preferred
    PageWaits waits() const;

    void bring(const std::vector<std::int32_t>& units) override;

    // Takes the room of all absent pages, for `read`, which reads what was taken, or gives the room
    // back and throws PageError. Returns false where there is no room.
    bool take_all();
    void read();
    void give_up();  // what was taken and not read

    // Has all of its pages go, or all but those that are preferred. Nobody reads it.
    void discard(bool preferred_too = true);
    // The same for good, before the memory is given back.
    void leave();

  private:
    friend class PagePool;

    void take(const std::vector<std::int32_t>& units);  // with the mutex held
    void fill(const std::vector<std::int32_t>& units);
    void check(const std::vector<std::int32_t>& units, std::size_t begin, std::size_t end) const;
    std::int64_t sweep(std::int64_t nbytes, bool preferred_too);  // as `take`
    void forget(std::int32_t begin, std::int32_t end);

    PagePool& pool_;
    const LayerPlace place_;
    std::vector<std::int32_t> taken_all_;
    std::vector<bool> preferred_;  // [units]
    std::int32_t taken_ = 0;       // units
    std::int32_t preferred_taken_ = 0;
    std::int32_t hand_ = 0;
    int pins_ = 0;
    PageWaits waits_;
};

}  // namespace kvdb
