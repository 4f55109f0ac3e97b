#include "common/machine.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

#if defined(__x86_64__)

namespace {

struct Registers {
    uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
    return r;
}

// Which register files the operating system saves; features that need others must not be used.
uint64_t saved_state(const Registers& leaf1) {
    if ((leaf1.c >> 27 & 1) == 0) {
        return 0;
    }
    uint32_t low = 0;
    uint32_t high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

// Tiles are large: Linux saves them only for processes that have requested it.
bool may_use_tiles(uint64_t saved) {
    if ((saved & 0x60000) != 0x60000) {
        return false;
    }
#ifdef __linux__
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return true;
#endif
}

}  // namespace

std::vector<Feature> cpu_features() {
    const Registers l1 = cpuid(1, 0);
    const Registers l7 = cpuid(7, 0);
    const Registers l71 = cpuid(7, 1);
    const uint64_t saved = saved_state(l1);
    const bool ymm = (saved & 0x6) == 0x6;
    const bool zmm = (saved & 0xe6) == 0xe6;
    const bool tiles = may_use_tiles(saved);
    const auto bit = [](uint32_t value, int index) { return (value >> index & 1) != 0; };
    return {
        {"avx2", ymm && bit(l7.b, 5)},
        {"fma", ymm && bit(l1.c, 12)},
        {"f16c", ymm && bit(l1.c, 29)},
        {"avx512f", zmm && bit(l7.b, 16)},
        {"avx512dq", zmm && bit(l7.b, 17)},
        {"avx512bw", zmm && bit(l7.b, 30)},
        {"avx512vl", zmm && bit(l7.b, 31)},
        {"avx512_vnni", zmm && bit(l7.c, 11)},
        {"avx512_bf16", zmm && bit(l71.a, 5)},
        {"avx_vnni", ymm && bit(l71.a, 4)},
        {"amx_tile", tiles && bit(l7.d, 24)},
        {"amx_int8", tiles && bit(l7.d, 25)},
        {"amx_bf16", tiles && bit(l7.d, 22)},
        {"pclmul", bit(l1.c, 1) && bit(l1.c, 19)},
        {"neon", false},
    };
}

#elif defined(__aarch64__)

std::vector<Feature> cpu_features() {
    bool bf16 = false;
    bool i8mm = false;
    bool crc32 = false;
#ifdef __linux__
    crc32 = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#ifdef HWCAP2_BF16
    bf16 = (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#endif
#ifdef HWCAP2_I8MM
    i8mm = (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#endif
#endif
    return {{"avx2", false}, {"neon", true}, {"bf16", bf16}, {"i8mm", i8mm}, {"crc32", crc32}};
}

#else

std::vector<Feature> cpu_features() { return {{"avx2", false}, {"neon", false}}; }

#endif

bool has_feature(const std::string& name) {
    const std::vector<Feature> features = cpu_features();
    return std::any_of(features.begin(), features.end(),
                       [&](const Feature& f) { return f.name == name && f.present; });
}

namespace {

int affinity_cores() {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        return CPU_COUNT(&set);
    }
#endif
    return static_cast<int>(std::thread::hardware_concurrency());
}

// The path of a process's cgroup for `controller` ("" for version 2), as /proc names it.
std::string cgroup_path(const std::string& membership, const std::string& controller) {
    std::ifstream file(membership);
    for (std::string line; std::getline(file, line);) {
        const size_t first = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            continue;
        }
        std::istringstream names(line.substr(first + 1, second - first - 1));
        bool is_wanted = controller.empty() && names.str().empty();
        for (std::string name; std::getline(names, name, ',');) {
            is_wanted = is_wanted || name == controller;
        }
        if (is_wanted) {
            return line.substr(second + 1);
        }
    }
    return "/";
}

// Cores by the quota files of one cgroup folder; infinity when there is no limit.
double quota_v2(const std::string& folder) {
    std::ifstream file(folder + "/cpu.max");
    double quota = 0;
    double period = 0;
    return file >> quota >> period && period > 0 ? quota / period : INFINITY;  // "max" is no number
}

double quota_v1(const std::string& folder) {
    std::ifstream quota_file(folder + "/cpu.cfs_quota_us");
    std::ifstream period_file(folder + "/cpu.cfs_period_us");
    double quota = 0;
    double period = 0;
    const bool known = quota_file >> quota && period_file >> period;
    return known && quota > 0 && period > 0 ? quota / period : INFINITY;
}

// A limit may sit on any ancestor; within a container the root itself carries it.
double tightest(const std::string& root, std::string path, double (*quota)(const std::string&)) {
    double cores = quota(root);
    while (path.size() > 1) {
        cores = std::min(cores, quota(root + path));
        path.erase(path.rfind('/'));
    }
    return cores;
}

}  // namespace

double quota_cores(const std::string& cgroups, const std::string& membership) {
    return std::min(tightest(cgroups, cgroup_path(membership, ""), quota_v2),
                    tightest(cgroups + "/cpu", cgroup_path(membership, "cpu"), quota_v1));
}

int available_cores(const std::string& cgroups, const std::string& membership) {
    const double quota = std::ceil(quota_cores(cgroups, membership));
    return std::max(1, static_cast<int>(std::min(static_cast<double>(affinity_cores()), quota)));
}

bool is_short_of_quota() { return quota_cores() < static_cast<double>(affinity_cores()); }

}  // namespace octavo
