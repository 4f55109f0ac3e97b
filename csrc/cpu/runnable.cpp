#include "cpu/runnable.h"

#include <algorithm>
#include <initializer_list>

#include "common/machine.h"

namespace octavo::cpu {

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

std::vector<std::string> runnable_isas() {
    const bool avx2 = has_all({"avx2", "fma", "f16c"});
    const bool avx512 =
        avx2 && (kIsEmulated || has_all({"avx512f", "avx512bw", "avx512vl", "avx512dq"}));
    const bool bf16 = avx512 && (kIsEmulated || has_all({"avx512_bf16", "avx512_vnni"}));
    const bool tiles = bf16 && (kIsEmulated || has_all({"amx_tile", "amx_bf16", "amx_int8"}));
    const bool neon = kIsEmulated ? avx2 : has_feature("neon");
    std::vector<std::string> names;
    const auto add_if = [&](bool runs, const char* name) {
        if (runs) {
            names.emplace_back(name);
        }
    };
    add_if(tiles, "amx");
    add_if(bf16, "avx512bf16");
    add_if(avx512, "avx512");
    add_if(avx2, "avx2");
    add_if(neon, "neon");
    add_if(true, "generic");
    return names;
}

}  // namespace octavo::cpu
