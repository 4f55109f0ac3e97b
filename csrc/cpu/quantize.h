// From numbers to small integers with a scale: activations as they come, weights at load.
#pragma once

#include "cpu/integers.h"

namespace octavo::cpu::OCTAVO_ISA {

// 32 activations as integers from -16383 to 16383, so fine that what is lost is less than bf16
// loses: value = q * scale. One bit less than there is room for, so that sums of products with the
// largest integers of any format (formats.h) fit 32 bits.
struct ActivationGroup {
    int16_t q[kGroupColumns];
    float scale;
    float sum;           // of the values as they are now
    float half_sums[2];  // of the first and the last 16
};

constexpr float kHighest = 16383.0F;
static_assert(kGroupColumns * kLargestInteger * 16383 < int64_t{1} << 31);
constexpr float kNegligible = 1e-30F;  // activations below are zero: kHighest over it is finite

// Sixteen activations each. Numbers that are not finite give any integers.
OCTAVO_INLINE void quantize_activations(Vec first, Vec second, ActivationGroup* to) {
    const float largest = reduce_max(max(abs(first), abs(second)));
    const bool is_zero = largest < kNegligible;
    const float scale = is_zero ? 0.0F : largest / kHighest;
    const Vec factor = broadcast(is_zero ? 0.0F : kHighest / largest);
    const Vec rounder = broadcast(kRounder);
    const int32_t first_sum = store_rounded(fma(first, factor, rounder), to->q);
    const int32_t second_sum = store_rounded(fma(second, factor, rounder), to->q + kLanes);
    to->scale = scale;
    to->sum = scale * static_cast<float>(first_sum + second_sum);
    to->half_sums[0] = scale * static_cast<float>(first_sum);
    to->half_sums[1] = scale * static_cast<float>(second_sum);
}

// 32 weights, as Q8: the largest one is 127; or as Q4: the scale and minimum, of some that are
// tried, with the least squared error. Scales are rounded to half precision first.
IntegerBlock quantize_group(Packing packing, const float* values);

}  // namespace octavo::cpu::OCTAVO_ISA
