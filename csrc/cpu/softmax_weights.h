// The two passes over a whole row of logits: its maxima, and its weights (sampling.h says what they
// are). Plain loops without float sums or fused operations: the bits are the same on every
// instruction set, only the width of the vectors differs.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/kernels.h"

namespace octavo::cpu {

// e^t for t <= 0; below -64 as at -64.
OCTAVO_INLINE float exp_unfused(float t) {
    // Comparing floats could trap, which keeps compilers from vectors; comparing their bits cannot.
    const int32_t size = std::bit_cast<int32_t>(t) & 0x7fffffff;
    const int32_t most = std::bit_cast<int32_t>(64.0F);
    t = -std::bit_cast<float>(size < most ? size : most);
    const float magic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to a whole number
    const float shifted = t * 1.44269504088896341F + magic;
    const float n = shifted - magic;
    const float r = (t - n * 0.693359375F) - n * -2.12194440e-4F;
    float y = 1.9875691500e-4F;
    y = y * r + 1.3981999507e-3F;
    y = y * r + 8.3334519073e-3F;
    y = y * r + 4.1665795894e-2F;
    y = y * r + 1.6666665459e-1F;
    y = y * r + 5.0000001201e-1F;
    y = (y * (r * r) + r) + 1.0F;
    const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(magic);
    return y * std::bit_cast<float>((exponent + 127) << 23);
}

// The weight of one token. 1024 has its last place at 2^-42, so adding it leaves whole units in the
// mantissa, rounded.
OCTAVO_INLINE uint64_t softmax_weight(float x, float max, float scale) {
    const double shifted = static_cast<double>(exp_unfused((x - max) * scale)) + 1024.0;
    return std::bit_cast<uint64_t>(shifted) - std::bit_cast<uint64_t>(1024.0);
}

}  // namespace octavo::cpu

#ifdef OCTAVO_ISA
namespace octavo::cpu::OCTAVO_ISA {

RowScan scan_row(const float* x, int64_t count, float* block_maxima);
uint64_t sum_softmax_weights(const float* x, int64_t count, float max, float scale,
                             uint64_t* block_weights);

}  // namespace octavo::cpu::OCTAVO_ISA
#endif
