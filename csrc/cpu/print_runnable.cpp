// Prints the instruction sets that this processor runs, as a CMake list: CMakeLists.txt builds and
// runs this where only these sets are wanted.
#include <cstdio>

#include "cpu/runnable.h"

int main() {
    const char* separator = "";
    for (const std::string& name : octavo::cpu::runnable_isas()) {
        std::printf("%s%s", separator, name.c_str());
        separator = ";";
    }
}
