#include "common/ranks.h"

#include <algorithm>
#include <array>
#include <new>

#include "common/check.h"
#include "common/futex.h"
#include "common/machine.h"
#include "common/spin.h"

namespace octavo {

namespace {

// Waited in pieces, of which each counts once: time in which this process was stopped itself, or
// the machine asleep, proves nothing about the others.
constexpr int64_t kSliceNs = 250'000'000;

int64_t whole_pages(int64_t num_bytes) {
    return (num_bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
}

}  // namespace

// Zeroed memory is a valid one.
struct Ranks::Shared {
    struct alignas(64) Counter {
        std::atomic<uint32_t> count;
    };
    Counter arrived;                          // at the barrier under way
    Counter generation;                       // counts barriers passed
    Counter parked;                           // workers that must be woken
    Counter failed;                           // 0, or 1 + the rank
    Counter begun;                            // the last step that a rank has begun with
    Counter joined;                           // ranks
    std::array<Counter, kMaxRanks> arrivals;  // of each rank's workers, at all barriers so far
};

Ranks::Ranks(int rank, int size, int workers_per_rank, int file, double patience_s)
    : rank_(rank),
      size_(size),
      workers_per_rank_(workers_per_rank),
      file_(file),
      patience_ns_(static_cast<int64_t>(patience_s * 1e9)),
      patience_(is_short_of_quota()) {
    check(size >= 1 && size <= kMaxRanks, "ranks: size is ", size, "; it must be from 1 to ",
          kMaxRanks);
    check(rank >= 0 && rank < size, "ranks: rank is ", rank, " of ", size);
    check(workers_per_rank >= 1, "ranks: workers_per_rank is ", workers_per_rank);
    check(patience_s > 0, "ranks: patience_s is ", patience_s, "; it must be above 0");
    memory_ = Memory::shared(file, 0, sizeof(Shared));
    shared_ = std::launder(reinterpret_cast<Shared*>(memory_.data()));
    next_offset_ = whole_pages(sizeof(Shared));
}

Memory Ranks::share(int64_t num_bytes) {
    if (num_bytes == 0) {
        return {};
    }
    Memory memory = Memory::shared(file_, next_offset_, num_bytes);
    next_offset_ += whole_pages(num_bytes);
    return memory;
}

bool Ranks::barrier() {
    Shared& shared = *shared_;
    if (failed() >= 0) {
        return false;
    }
    const uint32_t generation = shared.generation.count.load(std::memory_order_relaxed);
    shared.arrivals[static_cast<size_t>(rank_)].count.fetch_add(1, std::memory_order_relaxed);
    const uint32_t before = shared.arrived.count.fetch_add(1, std::memory_order_acq_rel);
    if (before + 1 == static_cast<uint32_t>(size_ * workers_per_rank_)) {
        shared.arrived.count.store(0, std::memory_order_relaxed);
        // Sequentially consistent, as `parked` is: either this sees who parks, or they see this.
        shared.generation.count.fetch_add(1, std::memory_order_seq_cst);
        if (shared.parked.count.load(std::memory_order_seq_cst) != 0) {
            wake(shared.generation.count);
        }
    } else {
        wait(generation);
    }
    return failed() < 0;
}

void Ranks::wait(uint32_t generation) {
    std::atomic<uint32_t>& word = shared_->generation.count;
    if (spin_while(word, generation, patience_, &Patience::within_ns)) {
        return;
    }
    shared_->parked.count.fetch_add(1, std::memory_order_seq_cst);
    int64_t waited_ns = 0;
    while (word.load(std::memory_order_seq_cst) == generation) {
        const int64_t begin = now_ns();
        park(word, generation, kSliceNs);
        waited_ns += std::min(now_ns() - begin, kSliceNs);
        if (waited_ns >= patience_ns_ && word.load(std::memory_order_seq_cst) == generation) {
            fail(slowest());
        }
    }
    shared_->parked.count.fetch_sub(1, std::memory_order_seq_cst);
}

// The rank whose workers have passed the fewest barriers.
int Ranks::slowest() const {
    const auto count_of = [&](int rank) {
        return shared_->arrivals[static_cast<size_t>(rank)].count.load(std::memory_order_relaxed);
    };
    int slowest = 0;
    for (int rank = 1; rank < size_; ++rank) {
        if (static_cast<int32_t>(count_of(rank) - count_of(slowest)) < 0) {
            slowest = rank;
        }
    }
    return slowest;
}

void Ranks::begin_step(uint32_t number) {
    std::atomic<uint32_t>& begun = shared_->begun.count;
    uint32_t last = begun.load(std::memory_order_relaxed);
    while (static_cast<int32_t>(number - last) > 0) {
        if (begun.compare_exchange_weak(last, number)) {
            wake(begun);
            return;
        }
    }
}

bool Ranks::await_step(uint32_t number, double timeout_s) {
    std::atomic<uint32_t>& begun = shared_->begun.count;
    const int64_t end = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
    while (true) {
        const uint32_t last = begun.load(std::memory_order_seq_cst);
        if (static_cast<int32_t>(last - number) >= 0) {
            return true;
        }
        const int64_t left = end - now_ns();
        if (left <= 0) {
            return false;
        }
        park(begun, last, left);
    }
}

void Ranks::join() { shared_->joined.count.fetch_add(1); }

int Ranks::num_joined() const { return static_cast<int>(shared_->joined.count.load()); }

void Ranks::fail(int rank) {
    check(rank >= 0 && rank < size_, "ranks: no rank ", rank, " of ", size_);
    uint32_t none = 0;
    shared_->failed.count.compare_exchange_strong(none, static_cast<uint32_t>(rank) + 1);
    shared_->generation.count.fetch_add(1, std::memory_order_seq_cst);
    wake(shared_->generation.count);
}

int Ranks::failed() const {
    return static_cast<int>(shared_->failed.count.load(std::memory_order_acquire)) - 1;
}

}  // namespace octavo
