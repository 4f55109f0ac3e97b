// Dot products of integers in plain C++.
#pragma once

namespace octavo::cpu::OCTAVO_ISA {

constexpr int kIntegerRows = 4;  // rows of activations at a time

struct Integers {
    int32_t lane[kLanes];
};
struct Pairs {
    int16_t lane[kLanes][2];
};

OCTAVO_INLINE Vec to_floats(const Integers& v) {
    return each([&](int i) { return static_cast<float>(v.lane[i]); });
}
OCTAVO_INLINE Vec load_half(const std::byte* from) {
    uint16_t bits[kLanes];
    std::memcpy(bits, from, sizeof bits);
    return each([&](int i) { return half_to_float(bits[i]); });
}

OCTAVO_INLINE Pairs byte_pairs(const std::byte* chunk, int index) {
    Pairs pairs;
    for (int i = 0; i < kLanes; ++i) {
        for (int j = 0; j < 2; ++j) {
            pairs.lane[i][j] = static_cast<int8_t>(chunk[4 * i + 2 * j + index]);
        }
    }
    return pairs;
}
OCTAVO_INLINE Pairs half_pairs(const std::byte* chunk, int index) {
    Pairs pairs;
    for (int i = 0; i < kLanes; ++i) {
        for (int j = 0; j < 2; ++j) {
            const auto both = static_cast<uint8_t>(chunk[4 * i + 2 * j + index % 2]);
            pairs.lane[i][j] = static_cast<int16_t>(index < 2 ? both & 15 : both >> 4);
        }
    }
    return pairs;
}

OCTAVO_INLINE Integers multiply_add(Integers sum, const Pairs& w, const std::byte* x) {
    int16_t pair[2];
    std::memcpy(pair, x, sizeof pair);
    for (int i = 0; i < kLanes; ++i) {
        sum.lane[i] += w.lane[i][0] * pair[0] + w.lane[i][1] * pair[1];
    }
    return sum;
}

}  // namespace octavo::cpu::OCTAVO_ISA
