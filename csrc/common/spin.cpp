#include "common/spin.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace octavo {

namespace {

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

}  // namespace

int64_t now_ns() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

bool spin_while(const std::atomic<uint32_t>& value, uint32_t old, Patience& patience,
                SpinBudget budget) {
    for (int i = 0; i < 64; ++i) {
        if (value.load(std::memory_order_acquire) != old) {
            return true;
        }
        pause();
    }
    const int64_t start = now_ns();
    int64_t budget_ns = (patience.*budget)(start);
    int64_t now = start;
    while (now - start < budget_ns) {
        for (int i = 0; i < 16; ++i) {
            if (value.load(std::memory_order_acquire) != old) {
                return true;
            }
            pause();
        }
        const int64_t before = now_ns();
        now = before;
        if (before - start > Patience::kQuietNs) {
            std::this_thread::yield();
            now = now_ns();
            if (now - before > Patience::kRivalNs) {
                patience.saw_rival(now);
                budget_ns = std::min(budget_ns, Patience::kLeastNs);
            }
        }
    }
    return value.load(std::memory_order_acquire) != old;
}

}  // namespace octavo
