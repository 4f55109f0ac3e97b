// From numbers to small integers with a scale: activations as they come, weights at load.
#pragma once

#include "cpu/integers.h"

namespace octavo::cpu::OCTAVO_ISA {

// 32 activations as integers: value = q * scale.
struct ActivationGroup {
    int16_t q[kGroupColumns];
    float scale;
    float sum;           // of the values as they are now
    float half_sums[2];  // of the first and the last 16
};

// The same where codes are bytes: columns in the order in which a quad has them.
struct ByteGroup {
    int8_t q[kGroupColumns];
    float scale;
    float sum;
    int32_t integer_sum;
};

// From -highest to highest. 16383 is so fine that what is lost is less than bf16 loses, and one bit
// less than there is room for, so that sums of products with the largest integers of any format
// (formats.h) fit 32 bits. 127 is what a byte holds.
constexpr float highest_activation(int bits) { return bits == 8 ? 127.0F : 16383.0F; }
static_assert(kGroupColumns * kLargestInteger * 16383 < int64_t{1} << 31);
constexpr float kNegligible = 1e-30F;  // activations below are zero: highest over it is finite

// Which of 16 columns is at each byte of four quads: of 8-bit codes, and of 4-bit ones.
constexpr uint8_t kQuadOrder[2][kLanes] = {
    {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15},
    {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15},
};

// Sixteen activations each; the sum of their integers. Numbers that are not finite give any.
OCTAVO_INLINE int32_t quantize_activations(Vec first, Vec second, float highest,
                                           ActivationGroup* to) {
    const float largest = reduce_max(max(abs(first), abs(second)));
    const bool is_zero = largest < kNegligible;
    const float scale = is_zero ? 0.0F : largest / highest;
    const Vec factor = broadcast(is_zero ? 0.0F : highest / largest);
    const Vec rounder = broadcast(kRounder);
    const int32_t first_sum = store_rounded(fma(first, factor, rounder), to->q);
    const int32_t second_sum = store_rounded(fma(second, factor, rounder), to->q + kLanes);
    to->scale = scale;
    to->sum = scale * static_cast<float>(first_sum + second_sum);
    to->half_sums[0] = scale * static_cast<float>(first_sum);
    to->half_sums[1] = scale * static_cast<float>(second_sum);
    return first_sum + second_sum;
}

OCTAVO_INLINE void quantize_activations(Vec first, Vec second, const uint8_t* order,
                                        ByteGroup* to) {
    ActivationGroup wide;
    to->integer_sum = quantize_activations(first, second, highest_activation(8), &wide);
    to->scale = wide.scale;
    to->sum = wide.sum;
    store_bytes(wide.q, order, to->q);
    store_bytes(wide.q + kLanes, order, to->q + kLanes);
}

// 32 weights, as Q8: the largest one is 127; or as Q4: the scale and minimum, of some that are
// tried, with the least squared error. Scales are rounded to half precision first.
IntegerBlock quantize_group(Packing packing, const float* values);

}  // namespace octavo::cpu::OCTAVO_ISA
