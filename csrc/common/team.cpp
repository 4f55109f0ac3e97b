#include "common/team.h"

#include <utility>

#ifdef __linux__
#include <sched.h>
#endif

#include "common/check.h"
#include "common/spin.h"
#include "cpu/isa.h"

namespace octavo {

namespace {

constexpr int kMaxThreads = 1024;

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
    rouse();
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
    patience_.saw_gap(now_ns() - ended_ns_);
    epoch_.fetch_add(1, std::memory_order_release);
    rouse();
    job(context, 0);
    barrier();
    ended_ns_ = now_ns();
}

void Team::work(int worker) {
    if (!cpus_.empty()) {
        keep_to(cpus_[static_cast<size_t>(worker)]);
    }
    uint32_t seen = 0;
    while (true) {
        wait_for_run(seen);
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
    if (!spin_while(generation_, generation, patience_, &Patience::within_ns)) {
        generation_.wait(generation, std::memory_order_acquire);
    }
}

void Team::wait_for_run(uint32_t seen) {
    while (true) {
        const uint32_t bell = bell_.load(std::memory_order_acquire);
        if (spin_while(epoch_, seen, patience_, &Patience::between_ns)) {
            return;
        }
        bell_.wait(bell, std::memory_order_acquire);
    }
}

void Team::rouse() {
    if (num_threads_ > 1) {
        bell_.fetch_add(1, std::memory_order_release);
        bell_.notify_all();
    }
}

}  // namespace octavo
