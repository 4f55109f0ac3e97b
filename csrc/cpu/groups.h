// One row's block of integers, outside of panels: how it is put there, taken from there, and which
// values it stands for.
#pragma once

#include <bit>

#include "common/dtype.h"
#include "cpu/formats.h"

namespace octavo::cpu {

struct IntegerBlock {
    uint8_t codes[8 * kGroupColumns];
    int8_t scales[16] = {};   // the small ones, where the format has them
    uint8_t minima[16] = {};  // the same
    uint16_t scale = 0;       // bits of a half, or an exponent
    uint16_t minimum = 0;     // bits of a half
    float factor = 0;         // the row's, where small scales are 8-bit floats
};

// 2^(exponent - 128): half of what the exponent says, because kFloat4 is doubled.
OCTAVO_INLINE float power_scale(uint32_t exponent) {
    const uint32_t normal = (exponent - 1) << 23;
    const uint32_t subnormal = 0x00200000U << (exponent & 1);
    return std::bit_cast<float>(exponent < 2 ? subnormal : normal);
}

// The half that is 1/256 of a number in 8 bits (e4m3), which must not be NaN.
OCTAVO_INLINE uint16_t e4m3_to_half(uint32_t bits) {
    return static_cast<uint16_t>((bits & 0x80U) << 8 | (bits & 0x7fU) << 7);
}
constexpr float kE4m3OverHalf = 256.0F;

// Into, and out of, block `index` of a panel, as its row `lane`. All of a row's have its factor.
void put(const Format& format, std::byte* panel, int64_t index, int64_t lane,
         const IntegerBlock& row);
IntegerBlock take(const Format& format, const std::byte* panel, int64_t index, int64_t lane);

// The values of a block, in the float operations and order of the `gguf` package.
void expand(const Format& format, const IntegerBlock& row, float* to);

}  // namespace octavo::cpu
