// A search of one index, prepared by the package that knows the index for one that does not.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "export.h"
#include "geometry.h"
#include "query_rows.h"

namespace kvdb::indexes {

// The name of the capsules in which searchers go from one extension module to another.
inline constexpr const char* kSearcherName = "kvdb.indexes.Searcher";

// What is asked for is fixed: queries come and go, from any number of threads at once. It keeps
// alive what it reads but the blocks, which the caller does.
class KVDB_BASE Searcher {
  public:
    // index: an address in the index that no other has. asked: what for; equal numbers mean the
    // same.
    Searcher(const Geometry& geometry, const std::uint64_t* table, std::int64_t tokens,
             int rows_together, const void* index, std::vector<double> asked)
        : geometry(geometry),
          table(table),
          tokens(tokens),
          rows_together(rows_together),
          index_(index),
          asked_(std::move(asked)) {}
    Searcher(const Searcher&) = delete;
    Searcher& operator=(const Searcher&) = delete;
    virtual ~Searcher();

    // The tokens of these blocks that are asked for, among those that the queries see. outside:
    // [q_heads][n], the log of the sum of exp(scale * q.k) over tokens elsewhere. Rows whose KV
    // head costs less to be read whole may be given up.
    virtual SearchResult search(const QueryRows& queries, const float* outside) const = 0;

    // Whether the other asks the same index for the same, so that one call answers both's queries.
    bool asks_like(const Searcher& other) const {
        return table == other.table && tokens == other.tokens && index_ == other.index_ &&
               asked_ == other.asked_;
    }

    const Geometry geometry;
    const std::uint64_t* const table;  // block base addresses
    const std::int64_t tokens;
    // Up to so many rows of a KV head, of several sessions, are searched sooner by one call than by
    // one for each session.
    const int rows_together;

  private:
    const void* const index_;
    const std::vector<double> asked_;
};

}  // namespace kvdb::indexes
