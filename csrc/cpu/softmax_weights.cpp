#include "cpu/softmax_weights.h"

#include <algorithm>
#include <limits>

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// Floats as whole numbers of the same order, both ways.
OCTAVO_INLINE int32_t ordered(float x) {
    const int32_t bits = std::bit_cast<int32_t>(x);
    return bits ^ (bits >> 31 & 0x7fffffff);
}
OCTAVO_INLINE float unordered(int32_t key) {
    return std::bit_cast<float>(key ^ (key >> 31 & 0x7fffffff));
}

struct Keys {
    int32_t greatest, least;
};

OCTAVO_INLINE Keys scan(const float* x, int64_t count) {
    Keys keys = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
    for (int64_t i = 0; i < count; ++i) {
        const int32_t key = ordered(x[i]);
        keys.greatest = key > keys.greatest ? key : keys.greatest;
        keys.least = key < keys.least ? key : keys.least;
    }
    return keys;
}

OCTAVO_INLINE uint64_t sum(const float* x, int64_t count, float max, float scale) {
    uint64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        total += softmax_weight(x[i], max, scale);
    }
    return total;
}

}  // namespace

RowScan scan_row(const float* x, int64_t count, float* block_maxima) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    Keys keys = {ordered(-kInfinity), ordered(-kInfinity)};
    for (int64_t start = 0; start < count; start += kLogitBlock) {
        const int64_t length = std::min(kLogitBlock, count - start);
        const Keys block =
            length == kLogitBlock ? scan(x + start, kLogitBlock) : scan(x + start, length);
        *block_maxima++ = unordered(block.greatest);
        keys = {std::max(keys.greatest, block.greatest), std::min(keys.least, block.least)};
    }
    // A NaN lies beyond the infinity of its sign.
    const bool usable = keys.greatest < ordered(kInfinity) && keys.least >= ordered(-kInfinity);
    return {unordered(keys.greatest), usable};
}

uint64_t sum_softmax_weights(const float* x, int64_t count, float max, float scale,
                             uint64_t* block_weights) {
    uint64_t total = 0;
    for (int64_t start = 0; start < count; start += kLogitBlock) {
        const int64_t length = std::min(kLogitBlock, count - start);
        const uint64_t weight = length == kLogitBlock ? sum(x + start, kLogitBlock, max, scale)
                                                      : sum(x + start, length, max, scale);
        *block_weights++ = weight;
        total += weight;
    }
    return total;
}

}  // namespace octavo::cpu::OCTAVO_ISA
