// From numbers to small integers with a scale: activations as they come, weights at load.
#pragma once

#include "cpu/groups.h"
#include "cpu/simd.h"

namespace octavo::cpu::OCTAVO_ISA {

// 32 activations as integers from -32767 to 32767, so fine that what is lost is less than bf16
// loses: value = q * scale.
struct ActivationGroup {
    int16_t q[kGroupColumns];
    float scale;
    float sum;  // of the values as they are now
};

constexpr float kRounder = 0x1.8p23F;  // added to a number: the low bits are its nearest integer
constexpr float kHighest = 32767.0F;
constexpr float kNegligible = 1e-30F;  // activations below are zero: kHighest over it is finite

// Sixteen activations each. Numbers that are not finite give any integers.
OCTAVO_INLINE void quantize_activations(Vec first, Vec second, ActivationGroup* to) {
    const float largest = reduce_max(max(abs(first), abs(second)));
    const bool is_zero = largest < kNegligible;
    const float scale = is_zero ? 0.0F : largest / kHighest;
    const Vec factor = broadcast(is_zero ? 0.0F : kHighest / largest);
    uint32_t bits[kGroupColumns];
    store(reinterpret_cast<float*>(bits), fma(first, factor, broadcast(kRounder)));
    store(reinterpret_cast<float*>(bits) + kLanes, fma(second, factor, broadcast(kRounder)));
    int32_t sum = 0;
    for (int64_t i = 0; i < kGroupColumns; ++i) {
        to->q[i] = static_cast<int16_t>(bits[i]);
    }
    for (int64_t i = 0; i < kGroupColumns; ++i) {
        sum += to->q[i];
    }
    to->scale = scale;
    to->sum = scale * static_cast<float>(sum);
}

// 32 weights, as Q8: the largest one is 127; or as Q4: the scale and minimum, of some that are
// tried, with the least squared error. Scales are rounded to half precision first.
GroupRow quantize_group(Packing packing, const float* values);

}  // namespace octavo::cpu::OCTAVO_ISA
