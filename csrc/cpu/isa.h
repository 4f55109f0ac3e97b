// The choice of instruction set at run time.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace octavo::cpu {

// Kernel tables that were compiled in and can run here, best first.
std::vector<const Kernels*> available_kernels();

// The table named `isa`; if that is empty, by the environment's OCTAVO_CPU_ISA, else the best.
// Throws ValueError if it is not available here.
const Kernels& select_kernels(const std::string& isa);

}  // namespace octavo::cpu
