// Scratch memory that a thread keeps between calls, so that a call of microseconds allocates
// nothing.
#pragma once

#include <cstddef>
#include <new>

namespace kvdb {

class Workspace {
  public:
    static Workspace& of_this_thread() {
        thread_local Workspace workspace;
        return workspace;
    }

    // At least `bytes`, aligned to a cache line, with arbitrary content; valid until the next call.
    std::byte* reserve(std::size_t bytes) {
        if (bytes > capacity_) {
            release();
            data_ = static_cast<std::byte*>(::operator new(bytes, kAlignment));
            capacity_ = bytes;
        }
        return data_;
    }

    Workspace() = default;
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    ~Workspace() { release(); }

  private:
    static constexpr std::align_val_t kAlignment{64};

    void release() {
        ::operator delete(data_, kAlignment);
        data_ = nullptr;
        capacity_ = 0;
    }

    std::byte* data_ = nullptr;
    std::size_t capacity_ = 0;
};

}  // namespace kvdb
