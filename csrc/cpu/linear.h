// dst = src · weightᵀ + bias in its three modes; see LinearArgs.
#pragma once

#include "cpu/kernels.h"

namespace octavo::cpu::OCTAVO_ISA {

// What one worker needs for a weight of this shape.
int64_t linear_scratch_bytes(const Panels& weight);

// Rows that are held in a form of their own while they meet all panels: larger products may be
// shared out in such blocks.
int64_t linear_block_rows(const Panels& weight);

// The outputs of units [begin, end), for all rows.
void linear(const LinearArgs& args, int64_t begin, int64_t end, std::byte* scratch);

}  // namespace octavo::cpu::OCTAVO_ISA
