// Parking on a word in memory that several processes share.
#pragma once

#include <atomic>
#include <cstdint>

namespace octavo {

// Until `word` is no longer `old`, somebody wakes this thread, or the time is up; it may also
// return for no reason.
void park(std::atomic<uint32_t>& word, uint32_t old, int64_t timeout_ns);

// Everybody parked on the word.
void wake(std::atomic<uint32_t>& word);

}  // namespace octavo
