// How x86's bf16 instructions round, as their manual says: to nearest, and small numbers are zero
// on the way in and out, whatever the control register says.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace octavo::emulated {

inline float flushed(float value) {
    return std::fabs(value) < 0x1.0p-126F ? std::copysign(0.0F, value) : value;
}

inline float fma_bf16(uint32_t a, uint32_t b, float sum) {
    const auto wide = [](uint32_t bits) { return flushed(std::bit_cast<float>(bits << 16)); };
    return flushed(std::fma(wide(a), wide(b), flushed(sum)));
}

inline float add(float a, float b) { return flushed(flushed(a) + flushed(b)); }

}  // namespace octavo::emulated
