#include "paged_memory.h"

#include <map>
#include <mutex>
#include <numeric>
#include <shared_mutex>

namespace kvdb {
namespace {

// All paged memories, by where they begin.
struct Known {
    std::shared_mutex mutex;
    std::map<std::uint64_t, PagedMemory*> memories;
    std::atomic<std::int64_t> count{0};  // so that who has none pays nothing

    static Known& instance() {
        static Known* const known = new Known;  // threads may outlive static objects
        return *known;
    }

    PagedMemory* at(std::uint64_t address) {
        const std::shared_lock lock(mutex);
        auto next = memories.upper_bound(address);
        if (next == memories.begin()) return nullptr;
        PagedMemory* const memory = std::prev(next)->second;
        return memory->covers(address) ? memory : nullptr;
    }
};

bool any_known() {
    return Known::instance().count.load(std::memory_order_acquire) != 0;
}

struct Rows {
    const Geometry& geometry;
    const std::uint64_t* table;
    std::size_t offset;  // of the head's keys or values in a block
    std::size_t stride, row_bytes;

    Rows(const Geometry& geometry, const std::uint64_t* table, int kv_head, bool values)
        : geometry(geometry),
          table(table),
          offset(values ? geometry.value_at(kv_head) : geometry.key_at(kv_head)),
          stride(values ? geometry.value_stride_bytes() : geometry.key_row_bytes()),
          row_bytes(values ? geometry.value_row_bytes() : geometry.key_row_bytes()) {}

    std::uint64_t address(std::int32_t token) const {
        const std::int32_t block = token / geometry.block_size;
        return table[block] + offset + (token - block * geometry.block_size) * stride;
    }
};

}  // namespace

PageError::~PageError() = default;

PagedMemory::PagedMemory(std::uint64_t begin, std::int64_t nbytes, std::int64_t unit_nbytes)
    : begin_(begin),
      end_(begin + static_cast<std::uint64_t>(nbytes)),
      unit_nbytes_(unit_nbytes),
      units_(static_cast<std::int32_t>(nbytes / unit_nbytes)),
      uses_(std::make_unique<std::atomic<std::uint8_t>[]>(nbytes / unit_nbytes)) {
    Known& known = Known::instance();
    const std::unique_lock lock(known.mutex);
    known.memories[begin_] = this;
    ++known.count;
}

PagedMemory::~PagedMemory() {
    close();
}

void PagedMemory::close() {
    Known& known = Known::instance();
    const std::unique_lock lock(known.mutex);
    const auto found = known.memories.find(begin_);
    if (found == known.memories.end() || found->second != this) return;
    known.memories.erase(found);
    --known.count;
}

void PagedMemory::use(std::uint64_t address, std::size_t nbytes,
                      std::vector<std::int32_t>& absent) {
    const auto unit = static_cast<std::uint64_t>(unit_nbytes_);
    const auto at = [&](std::uint64_t byte) {  // nearly always pages: a shift is a tenth of it
        return static_cast<std::int32_t>(unit == 4096 ? (byte - begin_) >> 12
                                                      : (byte - begin_) / unit);
    };
    const std::int32_t last = at(address + nbytes - 1);
    for (std::int32_t i = at(address); i <= last; ++i) {
        const std::uint8_t use = uses_[i].load(std::memory_order_acquire);
        if (use == Use::absent || use == on_its_way) {
            if (absent.empty() || absent.back() != i) absent.push_back(i);
        } else if (use != often) {
            uses_[i].store(often, std::memory_order_relaxed);
        }
    }
}

AskedRows::AskedRows(const Geometry& geometry, const std::uint64_t* table)
    : geometry_(geometry),
      table_(table),
      memory_(any_known() ? Known::instance().at(table[0]) : nullptr) {}

void AskedRows::add(int kv_head, const std::int32_t* tokens, std::int64_t count, bool values) {
    const Rows rows(geometry_, table_, kv_head, values);
    for (std::int64_t i = 0; i < count; ++i) {
        memory_->use(rows.address(tokens[i]), rows.row_bytes, absent_);
    }
}

void AskedRows::add(const AskedRows& others) {
    absent_.insert(absent_.end(), others.absent_.begin(), others.absent_.end());
}

void AskedRows::bring() {
    if (!absent_.empty()) memory_->bring(absent_);
    absent_.clear();
}

void require_rows(const Geometry& geometry, const std::uint64_t* table, int kv_head,
                  const std::int32_t* tokens, std::int64_t count, bool values) {
    if (!any_known() || count == 0) return;
    AskedRows asked(geometry, table);
    if (!asked.paged()) return;
    asked.add(kv_head, tokens, count, values);
    asked.bring();
}

void require_range(const Geometry& geometry, const std::uint64_t* table, int kv_head,
                   std::int64_t begin, std::int64_t count, bool values) {
    if (!any_known()) return;
    std::vector<std::int32_t> tokens(count);
    std::iota(tokens.begin(), tokens.end(), static_cast<std::int32_t>(begin));
    require_rows(geometry, table, kv_head, tokens.data(), count, values);
}

void require_values(const Geometry& geometry, const std::uint64_t* table,
                    const std::int64_t* offsets, std::int64_t rows, std::int64_t rows_of_head,
                    const std::int32_t* tokens) {
    if (!any_known() || offsets[rows] == 0) return;
    AskedRows asked(geometry, table);
    if (!asked.paged()) return;
    for (std::int64_t row = 0; row < rows; ++row) {
        asked.add(static_cast<int>(row / rows_of_head), tokens + offsets[row],
                  offsets[row + 1] - offsets[row], true);
    }
    asked.bring();
}

void require_blocks(const Geometry& geometry, const std::uint64_t* table,
                    const std::int32_t* counts, std::int64_t blocks, int kv_begin, int kv_end) {
    if (!any_known()) return;
    PagedMemory* memory = nullptr;
    std::vector<std::int32_t> absent;
    const auto bring = [&] {
        if (!absent.empty()) memory->bring(absent);
        absent.clear();
    };
    for (std::int64_t i = 0; i < blocks; ++i) {
        if (!memory || !memory->covers(table[i])) {
            bring();
            memory = Known::instance().at(table[i]);
        }
        if (!memory || memory->full() || counts[i] == 0) continue;
        for (int head = kv_begin; head < kv_end; ++head) {
            for (const bool values : {false, true}) {
                if (values && !geometry.own_values()) continue;
                const Rows rows(geometry, table + i, head, values);
                memory->use(rows.address(0), counts[i] * rows.row_bytes, absent);
            }
        }
    }
    bring();
}

}  // namespace kvdb
