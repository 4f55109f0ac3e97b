#include "cpu/isa.h"

#include <algorithm>
#include <cstdlib>

#include "common/check.h"
#include "common/machine.h"

namespace octavo::cpu {

namespace generic {
const Kernels& kernels();
}
#ifdef OCTAVO_X86_ISAS
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace avx512bf16 {
const Kernels& kernels();
}
#endif

namespace {

[[maybe_unused]] bool has_all(std::initializer_list<const char*> features) {
    return std::all_of(features.begin(), features.end(), has_feature);
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> tables;
#ifdef OCTAVO_X86_ISAS
    const bool avx2 = has_all({"avx2", "fma", "f16c"});
    const bool avx512 = avx2 && has_all({"avx512f", "avx512bw", "avx512vl", "avx512dq"});
    if (avx512 && has_all({"avx512_bf16", "avx512_vnni"})) {
        tables.push_back(&avx512bf16::kernels());
    }
    if (avx512) {
        tables.push_back(&avx512::kernels());
    }
    if (avx2) {
        tables.push_back(&avx2::kernels());
    }
#endif
    tables.push_back(&generic::kernels());
    return tables;
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
