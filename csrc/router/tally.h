// Counting many observations of a histogram at once.
#pragma once

#include <cstdint>
#include <span>

namespace octavo::router {

// Adds each value to the bucket of the first bound that is not below it, or to the last bucket.
// `counts` has one more place than `bounds`, which ascend. Returns the values' sum.
double tally(std::span<const double> bounds, std::span<const double> values,
             std::span<int64_t> counts);

}  // namespace octavo::router
