// The nodes of a machine whose processors have memory of their own (NUMA), and what lies where.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "export.h"

namespace kvdb {

struct MemoryNode {
    int id;
    std::vector<int> cpus;  // that the process may use; some
};

// What is known of the nodes, and the policy that follows from it: large memory is spread over all
// nodes page by page, because any thread may read any of it and so all of them read with the
// bandwidth of all nodes; threads are spread over the nodes, and each stays at one, where its
// scratch memory lies. On a machine of one node nothing is done.
class KVDB_BASE MemoryNodes {
  public:
    explicit MemoryNodes(std::vector<MemoryNode> nodes) : nodes_(std::move(nodes)) {}

    // Those with processors that this thread may use. root: the folder below which sys/ lies.
    static MemoryNodes read(const std::string& root);

    // Those of this process: of the machine, until others are set.
    static MemoryNodes current();
    static void set(MemoryNodes nodes);

    const std::vector<MemoryNode>& all() const { return nodes_; }

    // Asks for the pages of [address, address + bytes), which nobody has touched yet, from all
    // nodes in turns. Whether the system took it; false where there is but one node.
    bool interleave(void* address, std::size_t bytes) const;

    // Keeps the calling thread, the number-th of several, on the processors of one node. Whether
    // the system took it; false where there is but one node.
    bool stay(int number) const;

  private:
    std::vector<MemoryNode> nodes_;
};

}  // namespace kvdb
