// IEEE half precision, as scales are stored.
#pragma once

#include <bit>
#include <cstdint>

#include "common/dtype.h"

namespace octavo {

// Without branches, so that loops over it vectorise.
OCTAVO_INLINE float half_to_float(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    const uint32_t magnitude = wide + wide;
    const float normal = std::bit_cast<float>((magnitude >> 4) + (0xE0U << 23)) * 0x1.0p-112F;
    const float subnormal = std::bit_cast<float>((magnitude >> 17) | (126U << 23)) - 0.5F;
    const uint32_t result = magnitude < (1U << 27) ? std::bit_cast<uint32_t>(subnormal)
                                                   : std::bit_cast<uint32_t>(normal);
    return std::bit_cast<float>((wide & 0x80000000U) | result);
}

// Round to nearest, ties to even; too large becomes infinite, a NaN stays a NaN.
OCTAVO_INLINE uint16_t float_to_half(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000U);
    const uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude >= 0x47800000U) {  // 65536 and more
        return static_cast<uint16_t>(sign | (magnitude > 0x7f800000U ? 0x7e00U : 0x7c00U));
    }
    if (magnitude < 0x38800000U) {  // below the smallest normal one: the addition rounds
        const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
        return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000U));
    }
    const uint32_t odd = magnitude >> 13 & 1U;
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000U + 0xfffU + odd) >> 13));
}

}  // namespace octavo
