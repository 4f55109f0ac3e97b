// Operations that go row by row, element by element: see RowOp.
#pragma once

#include "cpu/kernels.h"

namespace octavo::cpu::OCTAVO_ISA {

// Rows [begin, end) of dst.
void row_op(const RowOpArgs& args, int64_t begin, int64_t end);

}  // namespace octavo::cpu::OCTAVO_ISA
