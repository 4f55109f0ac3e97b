#include "common/dtype.h"

#include "common/check.h"

namespace octavo {

Dtype parse_dtype(std::string_view name) {
    if (name == "f32") {
        return Dtype::F32;
    }
    check(name == "bf16", "dtype '", name, "' is not known; there are: f32, bf16");
    return Dtype::BF16;
}

}  // namespace octavo
