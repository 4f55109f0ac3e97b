// Checks on what comes from outside: a failed one throws, and Python sees a ValueError.
#pragma once

#include <sstream>
#include <stdexcept>

namespace octavo {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::invalid_argument(message.str());
}

template <class... Parts>
void check(bool condition, const Parts&... parts) {
    if (!condition) [[unlikely]] {
        fail(parts...);
    }
}

}  // namespace octavo
