// Processes of one host that compute the same program together: memory that all of them see, and a
// barrier over all their workers.
//
// A rank that ends or hangs must not leave the others waiting. `fail` ends every wait, now and from
// then on: a process that watches the others calls it, and so does a barrier that waits too long.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/memory.h"
#include "common/patience.h"

namespace octavo {

constexpr int kMaxRanks = 64;

class Ranks {
  public:
    // `file` is memory that all ranks map, all zero at first. `patience_s`: of a barrier.
    Ranks(int rank, int size, int workers_per_rank, int file, double patience_s);

    int rank() const { return rank_; }
    int size() const { return size_; }
    int workers_per_rank() const { return workers_per_rank_; }

    // Memory that all ranks see, behind what this rank requested before; all must ask for the same
    // in the same order.
    Memory share(int64_t num_bytes);

    // No worker of any rank passes before all have arrived; what was written before is seen after.
    // False from when a rank failed: what others should have written may be missing.
    bool barrier();

    // Ranks with steps of their own, which run them at the same time all the same: one says that it
    // begins with the step of that number, from 1 on, and the others see it.
    void begin_step(uint32_t number);
    // Whether some rank has; waits for it so long at most.
    bool await_step(uint32_t number, double timeout_s);
    // This rank is there; once each.
    void join();
    int num_joined() const;

    // The rank has ended, or hangs. Only the first one counts.
    void fail(int rank);
    int failed() const;  // -1: none

  private:
    struct Shared;

    void wait(uint32_t generation);
    int slowest() const;

    const int rank_;
    const int size_;
    const int workers_per_rank_;
    const int file_;
    const int64_t patience_ns_;
    Memory memory_;
    Shared* shared_;
    int64_t next_offset_;
    Patience patience_;
};

}  // namespace octavo
