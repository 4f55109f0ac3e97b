#include "cpu/isa.h"

#include <algorithm>
#include <cstdlib>

#include "common/check.h"
#include "common/machine.h"

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

#ifdef OCTAVO_EMULATE
constexpr bool kIsEmulated = true;  // what AVX2 has not is made of AVX2
#else
constexpr bool kIsEmulated = false;
#endif

bool has_all(std::initializer_list<const char*> features) {
    return std::all_of(features.begin(), features.end(), has_feature);
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
    const bool avx2 = has_all({"avx2", "fma", "f16c"});
    [[maybe_unused]] const bool avx512 =
        avx2 && (kIsEmulated || has_all({"avx512f", "avx512bw", "avx512vl", "avx512dq"}));
    [[maybe_unused]] const bool bf16 =
        avx512 && (kIsEmulated || has_all({"avx512_bf16", "avx512_vnni"}));
    [[maybe_unused]] const bool tiles = bf16 && (kIsEmulated || has_all({"amx_tile", "amx_bf16"}));
    [[maybe_unused]] const bool neon = kIsEmulated ? avx2 : has_feature("neon");
    std::vector<const Kernels*> tables;
#ifdef OCTAVO_HAS_AMX
    if (tiles) {
        tables.push_back(&amx::kernels());
    }
#endif
#ifdef OCTAVO_HAS_AVX512BF16
    if (bf16) {
        tables.push_back(&avx512bf16::kernels());
    }
#endif
#ifdef OCTAVO_HAS_AVX512
    if (avx512) {
        tables.push_back(&avx512::kernels());
    }
#endif
#ifdef OCTAVO_HAS_AVX2
    if (avx2) {
        tables.push_back(&avx2::kernels());
    }
#endif
#ifdef OCTAVO_HAS_NEON
    if (neon) {
        tables.push_back(&neon::kernels());
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
