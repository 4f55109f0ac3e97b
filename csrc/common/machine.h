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

// Cores' worth of time that the cgroup's quota gives; infinity where there is none. `cgroups` is
// where the quotas of version 2 are, with version 1 below; `membership` says which ones are this
// process's.
double quota_cores(const std::string& cgroups = "/sys/fs/cgroup",
                   const std::string& membership = "/proc/self/cgroup");

// Affinity and quota (rounded up) respected; at least 1.
int available_cores(const std::string& cgroups = "/sys/fs/cgroup",
                    const std::string& membership = "/proc/self/cgroup");

// Whether this process may use more cores at once than its quota lasts for: time that is spent
// waiting is then missing later.
bool is_short_of_quota();

}  // namespace octavo
