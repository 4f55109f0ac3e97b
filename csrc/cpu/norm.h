// RMS norm and layer norm of rows, with an optional addition first.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace octavo::cpu::OCTAVO_ISA {

// Rows [begin, end).
void rms_norm(const NormArgs& args, int64_t begin, int64_t end);
void layer_norm(const NormArgs& args, int64_t begin, int64_t end);

struct Moments {
    float mean;
    float factor;  // 1 / sqrt(variance + eps)
};
Moments moments(const float* x, int64_t count, float eps);

// 1 / sqrt(mean(x²) + eps). Squares are summed in 16 lanes over ascending columns.
float inverse_rms(const float* x, int64_t count, float eps);

}  // namespace octavo::cpu::OCTAVO_ISA
