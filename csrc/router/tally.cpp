#include "router/tally.h"

#include <algorithm>

namespace octavo::router {

double tally(std::span<const double> bounds, std::span<const double> values,
             std::span<int64_t> counts) {
    double sum = 0.0;
    for (const double value : values) {
        const auto at = std::lower_bound(bounds.begin(), bounds.end(), value);
        counts[static_cast<size_t>(at - bounds.begin())] += 1;
        sum += value;
    }
    return sum;
}

}  // namespace octavo::router
