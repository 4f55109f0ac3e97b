#include "cpu/quantize.h"

#include <cstring>

#include "common/half.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

OCTAVO_INLINE Vec rounded(Vec v) { return (v + broadcast(kRounder)) - broadcast(kRounder); }

OCTAVO_INLINE Vec clamped(Vec v, float low, float high) {
    return min(max(v, broadcast(low)), broadcast(high));
}

OCTAVO_INLINE float half_of(float value) { return half_to_float(float_to_half(value)); }

struct Pair {
    Vec first, second;
};

OCTAVO_INLINE float sum(Pair v) { return reduce_add(v.first + v.second); }

OCTAVO_INLINE float dot(Pair a, Pair b) {
    return reduce_add(fma(a.first, b.first, a.second * b.second));
}

void store_integers(Pair v, uint8_t* to) {
    float values[kGroupColumns];
    store(values, v.first);
    store(values + kLanes, v.second);
    for (int64_t i = 0; i < kGroupColumns; ++i) {
        to[i] =
            static_cast<uint8_t>(static_cast<int>(values[i]));  // negative ones: two's complement
    }
}

IntegerBlock quantize_q8(Pair x) {
    const float largest = reduce_max(max(abs(x.first), abs(x.second)));
    IntegerBlock row;
    std::memset(row.codes, 0, kGroupColumns);
    row.scale = float_to_half(largest / 127.0F);
    const float scale = half_to_float(row.scale);
    if (scale > 0.0F) {
        const Vec divisor = broadcast(scale);  // rounded down it makes the largest 128
        store_integers({clamped(rounded(x.first / divisor), -127.0F, 127.0F),
                        clamped(rounded(x.second / divisor), -127.0F, 127.0F)},
                       row.codes);
    }
    return row;
}

struct Q4Guess {
    float scale, minimum;
    Pair q;
    float error;
};

// The best integers for a scale and a minimum, and how far off they are.
OCTAVO_INLINE Q4Guess guess(Pair x, float scale, float minimum) {
    Q4Guess result{half_of(scale), half_of(minimum), {}, 0.0F};
    const Vec divisor = broadcast(result.scale > 0.0F ? result.scale : 1.0F);
    const Vec low = broadcast(result.minimum);
    result.q = {clamped(rounded((x.first - low) / divisor), 0.0F, 15.0F),
                clamped(rounded((x.second - low) / divisor), 0.0F, 15.0F)};
    const Vec d = broadcast(result.scale);
    const Pair off{fma(result.q.first, d, low) - x.first, fma(result.q.second, d, low) - x.second};
    result.error = dot(off, off);
    return result;
}

// Ends drawn in a little cost the outermost values some precision and give it to all the others;
// then scale and minimum that fit those integers best.
IntegerBlock quantize_q4(Pair x) {
    constexpr int kTries = 8;
    constexpr float kStep = 0.4F;  // of 15 steps
    const Vec negated_first = broadcast(0.0F) - x.first;
    const Vec negated_second = broadcast(0.0F) - x.second;
    const float highest = reduce_max(max(x.first, x.second));
    const float lowest = 0.0F - reduce_max(max(negated_first, negated_second));
    const float range = highest - lowest;
    const float x_sum = sum(x);
    Q4Guess best = guess(x, range / 15.0F, lowest);
    for (int i = 0; i < kTries; ++i) {
        const float scale = range / (14.4F + static_cast<float>(i) * kStep);
        const float rest = range - scale * 15.0F;
        const Q4Guess tried = guess(x, scale, lowest + rest * 0.5F);
        const float q_sum = sum(tried.q);
        const float q_squares = dot(tried.q, tried.q);
        const float determinant = 32.0F * q_squares - q_sum * q_sum;
        if (!(determinant > 0.0F)) {
            continue;
        }
        const float fitted = (32.0F * dot(tried.q, x) - q_sum * x_sum) / determinant;
        const Q4Guess refined = guess(x, fitted, (x_sum - fitted * q_sum) / 32.0F);
        if (refined.scale > 0.0F && refined.error < best.error) {
            best = refined;
        }
        if (tried.error < best.error) {
            best = tried;
        }
    }
    IntegerBlock row;
    row.scale = float_to_half(best.scale);
    row.minimum = float_to_half(best.minimum);
    store_integers(best.q, row.codes);
    return row;
}

}  // namespace

IntegerBlock quantize_group(Packing packing, const float* values) {
    const Pair x{load(values), load(values + kLanes)};
    return packing == Packing::Q8 ? quantize_q8(x) : quantize_q4(x);
}

}  // namespace octavo::cpu::OCTAVO_ISA
