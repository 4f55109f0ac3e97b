// 8-bit floats as the KV cache holds them: a sign, `ExponentBits`, the mantissa. Rows are scaled to
// the format's largest number, and subnormals are not written: so small beside the row's largest, a
// number rounds to zero or to the smallest normal one. Hence a byte widens by moving its bits.
#pragma once

#include <bit>
#include <cstdint>

#include "common/dtype.h"

namespace octavo::cpu {

template <int ExponentBits>
struct Fp8 {
    static constexpr int kMantissaBits = 7 - ExponentBits;
    static constexpr int kBias = (1 << (ExponentBits - 1)) - 1;
    // 1.75 * 2^8 and 1.75 * 2^15: e4m3 gives up one mantissa for NaN, e5m2 a whole exponent.
    static constexpr float kLargest = ExponentBits == 4 ? 448.0F : 57344.0F;

    // A byte above eight zeros, shifted right as a signed number and masked, is a bf16 that is
    // 1 / kFactor of the number.
    static constexpr int kShift = 8 - ExponentBits;
    static constexpr int kMask = 0x8000 | 0x7f00 >> kShift;
    static constexpr float kFactor = std::bit_cast<float>((254U - kBias) << 23);

    static OCTAVO_INLINE float widen(uint32_t byte) {
        const auto top = static_cast<int16_t>(byte << 8);
        return bf16_to_float(static_cast<uint16_t>(top >> kShift & kMask)) * kFactor;
    }

    // Of numbers up to kLargest. Round to nearest, ties to even.
    static OCTAVO_INLINE uint8_t narrow(float value) {
        constexpr uint32_t kDropped = 23 - kMantissaBits;
        constexpr int32_t kSmallest = 1 << kMantissaBits;  // the smallest normal number
        const uint32_t bits = std::bit_cast<uint32_t>(value);
        const uint32_t magnitude = bits & 0x7fffffffU;
        const uint32_t odd = magnitude >> kDropped & 1U;
        const uint32_t rounded = (magnitude + (1U << (kDropped - 1)) - 1 + odd) >> kDropped;
        int32_t code = static_cast<int32_t>(rounded) - ((127 - kBias) << kMantissaBits);
        if (code < kSmallest) {
            code =
                magnitude < static_cast<uint32_t>(127 - kBias) << 23 ? 0 : kSmallest;  // its half
        }
        const uint32_t sign = bits >> 24 & 0x80U;
        return static_cast<uint8_t>(sign | static_cast<uint32_t>(code));
    }
};

using E4M3 = Fp8<4>;
using E5M2 = Fp8<5>;

}  // namespace octavo::cpu
