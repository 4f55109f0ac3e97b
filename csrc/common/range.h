// A run of indices, and its even division among workers.
#pragma once

#include <cstdint>

namespace octavo {

struct Range {
    int64_t begin;
    int64_t end;

    constexpr bool is_empty() const { return begin >= end; }
};

// The share of `worker`: contiguous, sizes differ by at most one.
constexpr Range split(int64_t count, int64_t worker, int64_t workers) {
    return {count * worker / workers, count * (worker + 1) / workers};
}

}  // namespace octavo
