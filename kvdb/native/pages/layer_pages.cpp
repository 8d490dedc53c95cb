// size: one class: how the pages of a layer come, are checked, and go.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <system_error>

#include "checksum.h"
#include "file_reads.h"
#include "page_pool.h"

namespace kvdb {
namespace {

constexpr std::int64_t kPieceBytes = 32 << 20;  // read and checked before the next is read

class File {
  public:
    explicit File(const std::string& path) {
#if defined(O_DIRECT)
        number_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
        if (number_ < 0 && errno != EINVAL) fail(path);  // or a file system without it
#endif
        if (number_ < 0) number_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (number_ < 0) fail(path);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() { close(number_); }

    int number() const { return number_; }

    void check_size(const std::string& path, std::int64_t expected) const {
        struct stat status;
        if (fstat(number_, &status) != 0) fail(path);
        if (status.st_size != expected) {
            throw PageError(EBADMSG,
                            "it has " + std::to_string(status.st_size) + " bytes of the " +
                                std::to_string(expected) + " that were written",
                            path);
        }
    }

  private:
    [[noreturn]] static void fail(const std::string& path) {
        const int code = errno;
        throw PageError(code, std::generic_category().message(code), path);
    }

    int number_ = -1;
};

}  // namespace

LayerPages::LayerPages(PagePool& pool, std::uint64_t begin, std::int64_t nbytes,
                       std::int64_t unit_nbytes, LayerPlace place)
    : PagedMemory(begin, nbytes, unit_nbytes),
      pool_(pool),
      place_(std::move(place)),
      preferred_(units_) {
    const std::lock_guard lock(pool_.mutex_);
    pool_.layers_.push_back(this);
}

LayerPages::~LayerPages() {
    const std::lock_guard lock(pool_.mutex_);
    std::erase(pool_.layers_, this);
}

void LayerPages::leave() {
    close();
    discard();
    const std::lock_guard lock(pool_.mutex_);
    std::erase(pool_.layers_, this);
}

void LayerPages::prefer(const std::vector<std::int32_t>& units) {
    const std::lock_guard lock(pool_.mutex_);
    preferred_.assign(units_, false);
    for (const std::int32_t unit : units) preferred_[unit] = true;
    preferred_taken_ = 0;
    for (std::int32_t unit = 0; unit < units_; ++unit) {
        preferred_taken_ +=
            preferred_[unit] && uses_[unit].load(std::memory_order_relaxed) != absent;
    }
}

void LayerPages::pin() {
    const std::lock_guard lock(pool_.mutex_);
    ++pins_;
}

void LayerPages::unpin() {
    const std::lock_guard lock(pool_.mutex_);
    --pins_;
}

std::int64_t LayerPages::nbytes() const {
    const std::lock_guard lock(pool_.mutex_);
    return taken_ * unit_nbytes_;
}

std::int64_t LayerPages::missing_nbytes() const {
    const std::lock_guard lock(pool_.mutex_);
    return (units_ - taken_) * unit_nbytes_;
}

std::int64_t LayerPages::preferred_nbytes() const {
    const std::lock_guard lock(pool_.mutex_);
    return preferred_taken_ * unit_nbytes_;
}

PageWaits LayerPages::waits() const {
    const std::lock_guard lock(pool_.mutex_);
    return waits_;
}

void LayerPages::bring(const std::vector<std::int32_t>& units) {
    const auto begin = std::chrono::steady_clock::now();
    std::unique_lock lock(pool_.mutex_);
    const auto note = [&] {
        waits_.seconds +=
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    for (;;) {
        std::vector<std::int32_t> own;
        bool others = false;
        for (const std::int32_t unit : units) {
            const std::uint8_t use = uses_[unit].load(std::memory_order_relaxed);
            if (use == absent) own.push_back(unit);
            others |= use == on_its_way;
        }
        if (own.empty() && !others) return note();
        if (!own.empty()) {
            std::sort(own.begin(), own.end());
            own.erase(std::unique(own.begin(), own.end()), own.end());
            if (!pool_.make_room(static_cast<std::int64_t>(own.size()) * unit_nbytes_)) {
                throw PageError(ENOBUFS, "there is no room for more of it", place_.file);
            }
            take(own);
            waits_.pages += static_cast<std::int64_t>(own.size());
            ++waits_.batches;
            lock.unlock();
            fill(own);
            lock.lock();
        } else {
            pool_.ended_.wait(lock);
        }
    }
}

bool LayerPages::take_all() {
    const std::lock_guard lock(pool_.mutex_);
    if (!pool_.make_room((units_ - taken_) * unit_nbytes_)) return false;
    std::vector<std::int32_t> units;
    for (std::int32_t unit = 0; unit < units_; ++unit) {
        if (uses_[unit].load(std::memory_order_relaxed) == absent) units.push_back(unit);
    }
    take(units);
    taken_all_ = std::move(units);
    return true;
}

void LayerPages::read() {
    std::vector<std::int32_t> units;
    {
        const std::lock_guard lock(pool_.mutex_);
        units.swap(taken_all_);
    }
    fill(units);
    std::unique_lock lock(pool_.mutex_);  // others may have brought some of it
    pool_.ended_.wait(lock, [&] { return full() || taken_ < units_; });
    if (!full()) {
        throw PageError(EAGAIN, "another call that read some of it did not succeed", place_.file);
    }
}

void LayerPages::give_up() {
    {
        const std::lock_guard lock(pool_.mutex_);
        for (const std::int32_t unit : taken_all_) forget(unit, unit + 1);
        taken_all_.clear();
    }
    pool_.ended_.notify_all();
}

void LayerPages::discard(bool preferred_too) {
    const std::lock_guard lock(pool_.mutex_);
    for (std::int32_t begin = 0, end; begin < units_; begin = end) {
        const auto goes = [&](std::int32_t unit) {
            return unit < units_ && uses_[unit].load(std::memory_order_relaxed) != absent &&
                   (preferred_too || !preferred_[unit]);
        };
        for (end = begin + 1; goes(begin) && goes(end);) ++end;
        if (goes(begin)) forget(begin, end);
    }
}

void LayerPages::take(const std::vector<std::int32_t>& units) {
    for (const std::int32_t unit : units) {
        uses_[unit].store(on_its_way, std::memory_order_relaxed);
        preferred_taken_ += preferred_[unit];
    }
    taken_ += static_cast<std::int32_t>(units.size());
    pool_.taken_ += static_cast<std::int64_t>(units.size()) * unit_nbytes_;
}

// Reads and checks units that were taken; if that fails, all of them are absent again.
void LayerPages::fill(const std::vector<std::int32_t>& units) {
    try {
        std::optional<File> file;
        if (!place_.read) file.emplace(place_.file).check_size(place_.file, place_.file_nbytes);
        const auto piece =
            static_cast<std::size_t>(std::max(kPieceBytes / unit_nbytes_, std::int64_t{1}));
        std::vector<std::uint64_t> offsets, addresses;
        for (std::size_t begin = 0; begin < units.size(); begin += piece) {
            const std::size_t end = std::min(begin + piece, units.size());
            offsets.clear();
            addresses.clear();
            for (std::size_t i = begin; i < end; ++i) {
                for (std::int64_t page = 0; page < unit_nbytes_; page += kFilePage) {
                    offsets.push_back(place_.at + units[i] * unit_nbytes_ + page);
                    addresses.push_back(address_of(units[i]) + page);
                }
            }
            if (file) {
                read_pages(file->number(), offsets.data(), addresses.data(),
                           static_cast<std::int64_t>(offsets.size()), ReadWay::ring);
            } else {
                place_.read(offsets, addresses);
            }
            check(units, begin, end);
        }
    } catch (...) {
        {
            const std::lock_guard lock(pool_.mutex_);
            for (const std::int32_t unit : units) forget(unit, unit + 1);
        }
        pool_.ended_.notify_all();
        try {
            throw;
        } catch (const std::system_error& error) {
            throw PageError(error.code().value(), error.code().message(), place_.file);
        }
    }
    {
        const std::lock_guard lock(pool_.mutex_);
        for (const std::int32_t unit : units)
            uses_[unit].store(new_here, std::memory_order_release);
        present_.fetch_add(static_cast<std::int32_t>(units.size()), std::memory_order_release);
    }
    pool_.ended_.notify_all();
}

void LayerPages::check(const std::vector<std::int32_t>& units, std::size_t begin,
                       std::size_t end) const {
    const std::int64_t size = place_.sum_nbytes;
    const auto sums = static_cast<std::int64_t>(place_.sums.size());
    for (std::size_t i = begin; i < end; ++i) {
        // A unit is one sum's bytes, or everything.
        const std::int64_t first = units_ == 1 ? 0 : units[i];
        const std::int64_t last = units_ == 1 ? sums : first + 1;
        for (std::int64_t sum = first; sum < last; ++sum) {
            const std::uint64_t address = begin_ + sum * size;
            std::uint32_t found;
            crc32c(&address, 1, static_cast<std::size_t>(size), &found);
            if (found == place_.sums[sum]) continue;
            throw PageError(EBADMSG,
                            "block " + std::to_string(sum * size / place_.block_nbytes) +
                                " of layer " + std::to_string(place_.layer) +
                                " does not match its checksum",
                            place_.file);
        }
    }
}

// Moves the clock's hand to the end of the set, or until so many bytes went.
std::int64_t LayerPages::sweep(std::int64_t nbytes, bool preferred_too) {
    if (pins_ > 0) return 0;
    std::int64_t gone = 0;
    std::int32_t first = hand_;  // of pages side by side that go
    const auto let_go = [&] {
        if (first < hand_) forget(first, hand_);
    };
    for (; hand_ < units_ && gone < nbytes; ++hand_) {
        const std::uint8_t use = uses_[hand_].load(std::memory_order_relaxed);
        const bool stays = preferred_[hand_] && !preferred_too;
        if (use == new_here && !stays) {
            gone += unit_nbytes_;
            continue;
        }
        let_go();
        first = hand_ + 1;
        if (use != absent && use != on_its_way && !stays) {
            uses_[hand_].store(use - 1, std::memory_order_relaxed);
        }
    }
    let_go();
    if (hand_ == units_) hand_ = 0;
    return gone;
}

// Units [begin, end) that are there, or on their way, are absent from now on.
void LayerPages::forget(std::int32_t begin, std::int32_t end) {
    for (std::int32_t unit = begin; unit < end; ++unit) {
        if (uses_[unit].exchange(absent, std::memory_order_relaxed) != on_its_way) {
            present_.fetch_sub(1, std::memory_order_release);
        }
        preferred_taken_ -= preferred_[unit];
    }
    madvise(reinterpret_cast<void*>(address_of(begin)),
            static_cast<std::size_t>((end - begin) * unit_nbytes_), MADV_DONTNEED);
    taken_ -= end - begin;
    pool_.taken_ -= (end - begin) * unit_nbytes_;
}

}  // namespace kvdb
