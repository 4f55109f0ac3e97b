#include "cpu/isa.h"

#include <algorithm>
#include <cstdlib>

#include "common/check.h"
#include "cpu/runnable.h"

namespace octavo::cpu {

// Declared whether compiled in or not; OCTAVO_HAS_… says what is.
namespace generic {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace avx512bf16 {
const Kernels& kernels();
}
namespace amx {
const Kernels& kernels();
}
namespace neon {
const Kernels& kernels();
}

namespace {

// All tables that were compiled in.
std::vector<const Kernels*> built_kernels() {
    return {
#ifdef OCTAVO_HAS_AMX
        &amx::kernels(),
#endif
#ifdef OCTAVO_HAS_AVX512BF16
        &avx512bf16::kernels(),
#endif
#ifdef OCTAVO_HAS_AVX512
        &avx512::kernels(),
#endif
#ifdef OCTAVO_HAS_AVX2
        &avx2::kernels(),
#endif
#ifdef OCTAVO_HAS_NEON
        &neon::kernels(),
#endif
        &generic::kernels(),
    };
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
    const std::vector<const Kernels*> built = built_kernels();
    std::vector<const Kernels*> available;
    for (const std::string& name : runnable_isas()) {
        const auto table = std::find_if(built.begin(), built.end(),
                                        [&](const Kernels* one) { return one->isa == name; });
        if (table != built.end()) {
            available.push_back(*table);
        }
    }
    return available;
}

const Kernels& select_kernels(const std::string& isa) {
    const char* environment = std::getenv("OCTAVO_CPU_ISA");
    const std::string wanted = isa.empty() && environment != nullptr ? environment : isa;
    const std::vector<const Kernels*> tables = available_kernels();
    if (wanted.empty()) {
        return *tables.front();
    }
    std::string names;
    for (const Kernels* table : tables) {
        if (wanted == table->isa) {
            return *table;
        }
        names += (names.empty() ? "" : ", ") + std::string(table->isa);
    }
    fail("instruction set '", wanted,
         "' is not available here (isa, or OCTAVO_CPU_ISA); there are: ", names);
}

}  // namespace octavo::cpu
