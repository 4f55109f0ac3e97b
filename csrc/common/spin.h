// Waiting for a word to change without parking; what a worker does first wherever it waits.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/patience.h"

namespace octavo {

using SpinBudget = int64_t (Patience::*)(int64_t now_ns) const;

int64_t now_ns();

// Whether `value` became another one before the time was up. After a while others may have this
// processor in between; a yield that takes long shows that there are others.
bool spin_while(const std::atomic<uint32_t>& value, uint32_t old, Patience& patience,
                SpinBudget budget);

}  // namespace octavo
