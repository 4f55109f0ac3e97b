// Rows of a packed table, looked up by token id.
#pragma once

#include "cpu/kernels.h"

namespace octavo::cpu::OCTAVO_ISA {

// Rows [begin, end) of dst.
void embed(const EmbedArgs& args, int64_t begin, int64_t end);

}  // namespace octavo::cpu::OCTAVO_ISA
