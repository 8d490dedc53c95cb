#include "workspace.h"

namespace kvdb {

Workspace& Workspace::of_this_thread() {
    thread_local Workspace workspace;
    return workspace;
}

std::byte* Workspace::reserve(std::size_t bytes) {
    if (bytes > capacity_) {
        release();
        data_ = static_cast<std::byte*>(::operator new(bytes, kAlignment));
        capacity_ = bytes;
    }
    return data_;
}

void Workspace::release() {
    ::operator delete(data_, kAlignment);
    data_ = nullptr;
    capacity_ = 0;
}

}  // namespace kvdb
