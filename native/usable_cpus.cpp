#include "usable_cpus.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

namespace kvdb {
namespace {

constexpr double kNoQuota = std::numeric_limits<double>::infinity();

int cpus_of_affinity() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

double worth(double quota_us, double period_us) {
    return quota_us > 0 && period_us > 0 ? quota_us / period_us : kNoQuota;
}

// Version 2: "150000 100000", or "max 100000" without a quota.
double quota_of_v2(const std::string& folder) {
    std::ifstream file(folder + "/cpu.max");
    double quota = 0, period = 0;
    return file >> quota >> period ? worth(quota, period) : kNoQuota;
}

// Version 1: two files, with a quota of -1 where there is none.
double quota_of_v1(const std::string& folder) {
    std::ifstream quota_file(folder + "/cpu.cfs_quota_us"),
        period_file(folder + "/cpu.cfs_period_us");
    double quota = 0, period = 0;
    return quota_file >> quota && period_file >> period ? worth(quota, period) : kNoQuota;
}

// The smallest quota of a group and those it lies in. In a container without a namespace of its own
// for groups, the path is that of the host, and what is mounted is the container's group.
template <class Read>
double smallest(const std::string& mount, std::string path, Read&& read) {
    for (double least = kNoQuota;;) {
        least = std::min(least, read(mount + path));
        if (path.empty()) return least;
        path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
    }
}

bool names_cpu(const std::string& controllers) {
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
        if (name == "cpu") return true;
    }
    return false;
}

}  // namespace

double cpu_quota(const std::string& root) {
    std::ifstream groups(root + "/proc/self/cgroup");
    const std::string mount = root + "/sys/fs/cgroup";
    double least = kNoQuota;
    for (std::string line; std::getline(groups, line);) {  // number:controllers:path
        const std::size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string path = line.substr(second + 1);
        if (controllers.empty()) {
            least = std::min(least, smallest(mount, path, quota_of_v2));
            least = std::min(least, smallest(mount + "/unified", path, quota_of_v2));
        } else if (names_cpu(controllers)) {
            least = std::min(least, smallest(mount + "/" + controllers, path, quota_of_v1));
            least = std::min(least, smallest(mount + "/cpu", path, quota_of_v1));
        }
    }
    return least;
}

int usable_cpus() {
    static const int cpus =
        static_cast<int>(std::clamp<double>(cpu_quota(""), 1, cpus_of_affinity()));  // rounds down
    return cpus;
}

std::vector<int> cpu_list(const std::string& text) {
    std::vector<int> cpus;
    std::istringstream ranges(text);
    for (std::string range; std::getline(ranges, range, ',');) {
        std::istringstream numbers(range);
        int first = 0, last = 0;
        if (!(numbers >> first)) return {};
        last = first;
        if (numbers.peek() == '-' && !(numbers.ignore() >> last)) return {};
        for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    }
    return cpus;
}

}  // namespace kvdb
