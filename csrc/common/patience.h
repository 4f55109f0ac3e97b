// How long a worker that waits keeps its processor before it parks.
//
// Parked, it has to be woken, and a virtual processor that is parked goes back to the hypervisor;
// kept, it is kept from others. So it is kept about as long as the wait usually takes, and given up
// soon for a while after another process was seen to want it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace octavo {

class Patience {
  public:
    // `is_short`: of a quota of processor time, which waiting uses up.
    explicit Patience(bool is_short) : most_ns_(is_short ? kShortNs : kMostBetweenNs) {}

    static constexpr int64_t kShortNs = 200'000;
    static constexpr int64_t kLeastNs = 50'000;
    static constexpr int64_t kQuietNs = 20'000;  // then it yields in each round
    static constexpr int64_t kRivalNs = 20'000;  // a yield that takes longer was to somebody
    static constexpr int64_t kWithinNs = 2'000'000;
    static constexpr int64_t kMostBetweenNs = 5'000'000;
    static constexpr int64_t kRecoveryNs = 100'000'000;

    // At a barrier within a run.
    int64_t within_ns(int64_t now) const { return spared(kWithinNs, now); }
    // For the next run: twice as long as it usually takes to come.
    int64_t between_ns(int64_t now) const {
        const int64_t usual = usual_gap_ns_.load(std::memory_order_relaxed);
        return spared(std::min(2 * usual, kMostBetweenNs), now);
    }

    void saw_gap(int64_t ns) {
        if (ns > kMostBetweenNs) {
            return;  // there was nothing to do
        }
        const int64_t usual = usual_gap_ns_.load(std::memory_order_relaxed);
        usual_gap_ns_.store(usual + (ns - usual) / 8, std::memory_order_relaxed);
    }
    void saw_rival(int64_t now) { rival_ns_.store(now, std::memory_order_relaxed); }

  private:
    // All of it again only some time after the last rival.
    int64_t spared(int64_t whole, int64_t now) const {
        whole = std::clamp(whole, kLeastNs, most_ns_);
        const int64_t since = now - rival_ns_.load(std::memory_order_relaxed);
        return since >= kRecoveryNs
                   ? whole
                   : kLeastNs + (whole - kLeastNs) / 100 * (since / (kRecoveryNs / 100));
    }

    const int64_t most_ns_;
    std::atomic<int64_t> usual_gap_ns_{0};
    std::atomic<int64_t> rival_ns_{-kRecoveryNs};
};

}  // namespace octavo
