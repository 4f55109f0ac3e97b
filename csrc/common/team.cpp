#include "common/team.h"

#include <chrono>
#include <utility>

#ifdef __linux__
#include <sched.h>
#endif

#include "common/check.h"
#include "cpu/isa.h"

namespace octavo {

namespace {

constexpr int kMaxThreads = 1024;
constexpr std::chrono::microseconds kSpin{
    50};  // a few instructions of a step; then the core is free

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Returns once `value` is no longer `old`.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
    for (int i = 0; i < 64; ++i) {
        if (value.load(std::memory_order_acquire) != old) {
            return;
        }
        pause();
    }
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    while (std::chrono::steady_clock::now() < deadline) {
        for (int i = 0; i < 16; ++i) {
            if (value.load(std::memory_order_acquire) != old) {
                return;
            }
            pause();
        }
    }
    value.wait(old, std::memory_order_acquire);
}

int checked_threads(int num_threads) {
    check(num_threads >= 1 && num_threads <= kMaxThreads, "num_threads is ", num_threads,
          "; it must be between 1 and ", kMaxThreads);
    return num_threads;
}

constexpr int kMaxCpus = 1024;  // of a cpu_set_t

std::vector<std::vector<int>> checked_cpus(std::vector<std::vector<int>> cpus, int num_threads) {
    check(cpus.empty() || static_cast<int>(cpus.size()) == num_threads, "cpus: ", cpus.size(),
          " lists for ", num_threads, " workers");
    for (const std::vector<int>& list : cpus) {
        check(!list.empty(), "cpus: a worker needs one at least");
        for (const int cpu : list) {
            check(cpu >= 0 && cpu < kMaxCpus, "cpus: no processor has the number ", cpu);
        }
    }
    return cpus;
}

// A processor that went away in the meantime is no reason to stop: the thread then runs anywhere.
void keep_to(const std::vector<int>& cpus) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) {
        CPU_SET(static_cast<size_t>(cpu), &set);
    }
    sched_setaffinity(0, sizeof(set), &set);
#else
    static_cast<void>(cpus);
#endif
}

}  // namespace

Team::Team(int num_threads, const std::string& isa, std::vector<std::vector<int>> cpus)
    : num_threads_(checked_threads(num_threads)),
      kernels_(cpu::select_kernels(isa)),
      cpus_(checked_cpus(std::move(cpus), num_threads)) {
    threads_.reserve(static_cast<size_t>(num_threads - 1));
    try {
        for (int worker = 1; worker < num_threads; ++worker) {
            threads_.emplace_back([this, worker] { work(worker); });
        }
    } catch (...) {  // the system gave no more threads: those that started must end first
        stop();
        throw;
    }
}

Team::~Team() { stop(); }

void Team::stop() {
    stopping_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& thread : threads_) {
        thread.join();
    }
}

void Team::run_job(Job job, void* context) {
    const std::lock_guard<std::mutex> lock(run_mutex_);
    if (num_threads_ == 1) {
        job(context, 0);
        return;
    }
    job_ = job;
    context_ = context;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    job(context, 0);
    barrier();
}

void Team::work(int worker) {
    if (!cpus_.empty()) {
        keep_to(cpus_[static_cast<size_t>(worker)]);
    }
    uint32_t seen = 0;
    while (true) {
        wait_while(epoch_, seen);
        seen += 1;
        if (stopping_) {
            return;
        }
        job_(context_, worker);
        barrier();
    }
}

void Team::barrier() {
    if (num_threads_ == 1) {
        return;
    }
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    const uint32_t before = arrived_.fetch_add(1, std::memory_order_acq_rel);
    if (before + 1 == static_cast<uint32_t>(num_threads_)) {
        arrived_.store(0, std::memory_order_relaxed);
        generation_.fetch_add(1, std::memory_order_release);
        generation_.notify_all();
        return;
    }
    wait_while(generation_, generation);
}

}  // namespace octavo
