#include "common/futex.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#else
#include <algorithm>
#include <chrono>
#include <thread>
#endif

namespace octavo {

#ifdef __linux__

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

void park(std::atomic<uint32_t>& word, uint32_t old, int64_t timeout_ns) {
    const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT, old, &timeout, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

#else

void park(std::atomic<uint32_t>& word, uint32_t old, int64_t timeout_ns) {
    if (word.load(std::memory_order_acquire) == old) {
        std::this_thread::sleep_for(
            std::chrono::nanoseconds(std::min<int64_t>(timeout_ns, 1'000'000)));
    }
}

void wake(std::atomic<uint32_t>&) {}

#endif

}  // namespace octavo
