#include "memory_nodes.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <optional>

#include "usable_cpus.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvdb {
namespace {

std::mutex mutex;
std::optional<MemoryNodes> chosen;

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

std::vector<int> permitted(std::vector<int> cpus) {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        std::erase_if(cpus, [&](int cpu) { return cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &set); });
    }
#endif
    return cpus;
}

}  // namespace

MemoryNodes MemoryNodes::read(const std::string& root) {
    const std::string folder = root + "/sys/devices/system/node/";
    std::vector<MemoryNode> nodes;
    for (const int id : cpu_list(first_line(folder + "has_memory"))) {
        const std::string name = folder + "node" + std::to_string(id) + "/cpulist";
        std::vector<int> cpus = permitted(cpu_list(first_line(name)));
        if (!cpus.empty()) nodes.push_back({id, std::move(cpus)});
    }
    return MemoryNodes(std::move(nodes));
}

MemoryNodes MemoryNodes::current() {
    const std::lock_guard lock(mutex);
    if (!chosen) chosen = read("");
    return *chosen;
}

void MemoryNodes::set(MemoryNodes nodes) {
    const std::lock_guard lock(mutex);
    chosen = std::move(nodes);
}

bool MemoryNodes::interleave(void* address, std::size_t bytes) const {
#if defined(__linux__) && defined(SYS_mbind)
    if (nodes_.size() < 2 || bytes == 0) return false;
    constexpr int kInterleave = 3;  // MPOL_INTERLEAVE of <linux/mempolicy.h>
    constexpr int kBits = 8 * sizeof(unsigned long);
    std::vector<unsigned long> mask;
    for (const MemoryNode& node : nodes_) {
        mask.resize(std::max<std::size_t>(mask.size(), node.id / kBits + 1));
        mask[node.id / kBits] |= 1ul << node.id % kBits;
    }
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<std::size_t>(address) / page * page;
    const std::size_t end = reinterpret_cast<std::size_t>(address) + bytes;
    // The kernel reads one bit less than it is told.
    return syscall(SYS_mbind, begin, end - begin, kInterleave, mask.data(), mask.size() * kBits + 1,
                   0) == 0;
#else
    static_cast<void>(address), static_cast<void>(bytes);
    return false;
#endif
}

bool MemoryNodes::stay(int number) const {
#if defined(__linux__)
    if (nodes_.size() < 2) return false;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : nodes_[number % nodes_.size()].cpus) {
        if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    }
    return sched_setaffinity(0, sizeof set, &set) == 0;
#else
    static_cast<void>(number);
    return false;
#endif
}

}  // namespace kvdb
