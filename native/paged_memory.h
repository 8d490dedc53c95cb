// Memory of which some may be absent until it is asked for: layers of segments that do not fit into
// main memory. Whoever is about to read keys or values that may lie there asks for them first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "export.h"
#include "geometry.h"

namespace kvdb {

// Absent memory that does not come. code: an error's number; ENOBUFS where there is no room for it,
// and EBADMSG where its file does not hold what was written.
class KVDB_BASE PageError : public std::runtime_error {
  public:
    PageError(int code, const std::string& what, std::string file)
        : std::runtime_error(what), code(code), file(std::move(file)) {}
    ~PageError() override;

    const int code;
    const std::string file;
};

// A range of addresses, known to the functions below until it is closed. Units of it come and go;
// none goes while somebody may be reading.
class KVDB_BASE PagedMemory {
  public:
    PagedMemory(std::uint64_t begin, std::int64_t nbytes, std::int64_t unit_nbytes);
    PagedMemory(const PagedMemory&) = delete;
    PagedMemory& operator=(const PagedMemory&) = delete;
    virtual ~PagedMemory();

    bool covers(std::uint64_t address) const { return address - begin_ < end_ - begin_; }
    bool full() const { return present_.load(std::memory_order_acquire) == units_; }

    // Notes that bytes are used, and adds their units that are absent to a list.
    void use(std::uint64_t address, std::size_t nbytes, std::vector<std::int32_t>& absent);

    // Nothing of it is read any more. Closing twice does nothing.
    void close();

    // Returns when these units are there. Throws PageError.
    virtual void bring(const std::vector<std::int32_t>& units) = 0;

    // What is known of a unit: it is absent, on its way, or there, and by how often it is passed
    // over before it goes.
    enum Use : std::uint8_t { absent = 0, new_here = 1, often = 3, on_its_way = 255 };

  protected:
    std::uint64_t address_of(std::int32_t unit) const { return begin_ + unit * unit_nbytes_; }

    const std::uint64_t begin_, end_;
    const std::int64_t unit_nbytes_;
    const std::int32_t units_;
    std::unique_ptr<std::atomic<std::uint8_t>[]> uses_;  // [units]
    std::atomic<std::int32_t> present_{0};
};

// Rows that are about to be read, so that those that are absent are read from disk together.
class KVDB_BASE AskedRows {
  public:
    // All blocks of a table lie in one such memory or none of them does.
    AskedRows(const Geometry& geometry, const std::uint64_t* table);

    bool paged() const { return memory_; }  // otherwise nothing may be added

    // Keys, or values, of these tokens of one KV head.
    void add(int kv_head, const std::int32_t* tokens, std::int64_t count, bool values);
    void add(const AskedRows& others);

    // Returns when they are there. Throws PageError.
    void bring();

  private:
    const Geometry& geometry_;
    const std::uint64_t* const table_;
    PagedMemory* const memory_;
    std::vector<std::int32_t> absent_;
};

// Have the keys, or the values, of these tokens of one KV head in memory. All blocks of a table lie
// in one such memory or none of them does. Throws PageError.
KVDB_BASE void require_rows(const Geometry& geometry, const std::uint64_t* table, int kv_head,
                            const std::int32_t* tokens, std::int64_t count, bool values);

// The same for tokens [begin, begin + count).
KVDB_BASE void require_range(const Geometry& geometry, const std::uint64_t* table, int kv_head,
                             std::int64_t begin, std::int64_t count, bool values);

// As `require_rows`, for the values of each row of a search; rows_of_head: of each KV head.
KVDB_BASE void require_values(const Geometry& geometry, const std::uint64_t* table,
                              const std::int64_t* offsets, std::int64_t rows,
                              std::int64_t rows_of_head, const std::int32_t* tokens);

// The same for the first counts[i] tokens of each block i, of KV heads [kv_begin, kv_end).
KVDB_BASE void require_blocks(const Geometry& geometry, const std::uint64_t* table,
                              const std::int32_t* counts, std::int64_t blocks, int kv_begin,
                              int kv_end);

}  // namespace kvdb
