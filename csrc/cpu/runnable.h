// Which instruction sets this processor runs, whether kernels for them were compiled in or not.
#pragma once

#include <string>
#include <vector>

namespace octavo::cpu {

// Names of cpu/isa.cpp's tables, best first; the last is "generic".
std::vector<std::string> runnable_isas();

}  // namespace octavo::cpu
