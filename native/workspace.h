// Scratch memory that a thread keeps between calls, so that short calls allocate nothing.
#pragma once

#include <cstddef>
#include <new>

#include "export.h"

namespace kvdb {

class KVDB_BASE Workspace {
  public:
    static Workspace& of_this_thread();

    // At least `bytes`, aligned to a cache line, with arbitrary content; valid until the next call.
    std::byte* reserve(std::size_t bytes);

    Workspace() = default;
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    ~Workspace() { release(); }

  private:
    static constexpr std::align_val_t kAlignment{64};

    void release();

    std::byte* data_ = nullptr;
    std::size_t capacity_ = 0;
};

}  // namespace kvdb
