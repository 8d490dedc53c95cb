#include "page_pool.h"

#include <algorithm>

namespace kvdb {

std::int64_t PagePool::set_limit(std::int64_t nbytes) {
    const std::lock_guard lock(mutex_);
    return limit_ = std::max(nbytes, taken_);
}

std::int64_t PagePool::nbytes() const {
    const std::lock_guard lock(mutex_);
    return taken_;
}

std::int64_t PagePool::shrink(std::int64_t nbytes) {
    const std::lock_guard lock(mutex_);
    return sweep(nbytes);
}

bool PagePool::make_room(std::int64_t nbytes) {
    const std::int64_t missing = taken_ + nbytes - limit_;
    return missing <= 0 || sweep(missing) >= missing;
}

// A clock: its hand passes over a page as often as the page's uses say, and takes one of them away
// each time. It passes over what is preferred until nothing else is left.
std::int64_t PagePool::sweep(std::int64_t nbytes) {
    std::int64_t gone = 0;
    const std::size_t turns = (LayerPages::often + 1) * layers_.size();
    for (const bool preferred_too : {false, true}) {
        for (std::size_t turn = 0; turn < turns && gone < nbytes; ++turn) {
            gone += layers_[next_ % layers_.size()]->sweep(nbytes - gone, preferred_too);
            if (gone < nbytes) ++next_;
        }
    }
    return gone;
}

}  // namespace kvdb
