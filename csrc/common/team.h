// Worker threads that compute together: the caller is worker 0, the others wait for a
// while, then park (patience.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "common/machine.h"
#include "common/patience.h"
#include "common/range.h"

namespace octavo {

namespace cpu {
struct Kernels;
}

class Team {
  public:
    // `isa` as cpu::select_kernels takes it. `cpus` says for each worker which processors it may
    // use; empty: any, and the caller's thread is left alone. Throws ValueError on what cannot be.
    explicit Team(int num_threads, const std::string& isa = "",
                  std::vector<std::vector<int>> cpus = {});
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int num_threads() const { return num_threads_; }
    const cpu::Kernels& kernels() const { return kernels_; }
    uint32_t num_barriers() const { return generation_.load(std::memory_order_relaxed); }

    // Calls body(worker) once on every worker and returns when all are done. `body` must not throw.
    // One run at a time; a second caller waits for the first.
    template <class Body>
    void run(Body&& body) {
        using Plain = std::remove_reference_t<Body>;
        run_job([](void* context, int worker) { (*static_cast<Plain*>(context))(worker); }, &body);
    }

    // body(begin, end) over disjoint parts of [0, count).
    template <class Body>
    void parallel_for(int64_t count, Body&& body) {
        run([&](int worker) {
            const Range range = split(count, worker, num_threads_);
            if (range.begin < range.end) {
                body(range.begin, range.end);
            }
        });
    }

    // Within run: no worker passes before all have arrived. What was written before is seen after.
    void barrier();

  private:
    using Job = void (*)(void* context, int worker);

    void run_job(Job job, void* context);
    void work(int worker);
    void wait_for_run(uint32_t seen);
    void rouse();  // those that have parked
    void stop();

    const int num_threads_;
    const cpu::Kernels& kernels_;
    const std::vector<std::vector<int>> cpus_;
    std::mutex run_mutex_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    int64_t ended_ns_ = 0;  // the run before
    Patience patience_{is_short_of_quota()};
    alignas(64) std::atomic<uint32_t> epoch_{0};       // counts runs; workers wait for the next
    alignas(64) std::atomic<uint32_t> bell_{0};        // what parked workers wait for
    alignas(64) std::atomic<uint32_t> arrived_{0};     // at the barrier under way
    alignas(64) std::atomic<uint32_t> generation_{0};  // counts barriers passed
    std::vector<std::thread> threads_;
};

}  // namespace octavo
