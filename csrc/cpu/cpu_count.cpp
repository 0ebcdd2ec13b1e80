// How many CPUs this process may use. Knows nothing of the pool.
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "thread_pool.h"

namespace octavo {

namespace {

// CPUs' worth of time that a quota and a period allow; infinity where there is no quota.
double quota_cpus(const std::string& quota, const std::string& period) {
    if (quota.empty() || period.empty() || quota == "max" || quota[0] == '-') return HUGE_VAL;
    return std::atof(quota.c_str()) / std::max(1.0, std::atof(period.c_str()));
}

std::string read_word(std::ifstream&& file) {
    std::string word;
    file >> word;
    return word;
}

// The tightest quota on the path from this process's cgroup up to the root, in either version of the interface.
double cgroup_cpus() {
    double cpus = HUGE_VAL;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // hierarchy:controllers:path
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const bool version2 = controllers.empty();
        if (!version2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
        for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
            if (path == "/") path.clear();
            if (version2) {
                std::ifstream file("/sys/fs/cgroup" + path + "/cpu.max");
                std::string quota, period;
                file >> quota >> period;
                cpus = std::min(cpus, quota_cpus(quota, period));
            } else {
                const std::string folder = "/sys/fs/cgroup/cpu" + path;
                cpus = std::min(cpus, quota_cpus(read_word(std::ifstream(folder + "/cpu.cfs_quota_us")),
                                                 read_word(std::ifstream(folder + "/cpu.cfs_period_us"))));
            }
            if (path.rfind('/') == std::string::npos) break;
        }
    }
    return cpus;
}

}  // namespace

int default_num_threads() {
    cpu_set_t set;
    CPU_ZERO(&set);
    const int affinity = sched_getaffinity(0, sizeof(set), &set) == 0
                             ? CPU_COUNT(&set)
                             : static_cast<int>(std::thread::hardware_concurrency());
    return std::max(1, static_cast<int>(std::min<double>(affinity, std::floor(cgroup_cpus()))));
}

}  // namespace octavo
