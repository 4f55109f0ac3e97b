// An answer's token counts, found without parsing it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace octavo::router {

struct Usage {
    int64_t prompt_tokens = 0;
    int64_t output_tokens = 0;
    std::optional<int64_t> cached_tokens;  // absent: not reported
};

// The counts of the last usage object in the answer, zeros if there is none. What it means:
// octavo_router.residency.usage.
Usage find_usage(std::string_view answer);

}  // namespace octavo::router
