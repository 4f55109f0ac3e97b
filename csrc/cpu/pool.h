// One row from all rows of a sequence: mean, maximum and their kin.
#pragma once

#include "cpu/kernels.h"

namespace octavo::cpu::OCTAVO_ISA {

// Sequences [begin, end). A sum runs over a sequence's tokens in ascending order.
void pool(const PoolArgs& args, int64_t begin, int64_t end);

}  // namespace octavo::cpu::OCTAVO_ISA
