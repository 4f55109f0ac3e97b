// What this machine offers: processor features, and cores that this process may use.
#pragma once

#include <string>
#include <vector>

namespace octavo {

struct Feature {
    std::string name;
    bool present;
};

// Features of the processor that the operating system lets us use.
std::vector<Feature> cpu_features();

bool has_feature(const std::string& name);

// Affinity and cgroup quota (rounded up) respected; at least 1. `cgroups` is where the quotas of
// version 2 are, with version 1 below; `membership` says which ones are this process's.
int available_cores(const std::string& cgroups = "/sys/fs/cgroup",
                    const std::string& membership = "/proc/self/cgroup");

}  // namespace octavo
