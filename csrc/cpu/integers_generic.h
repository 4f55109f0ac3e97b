// Dot products of integers in plain C++.
#pragma once

namespace octavo::cpu::OCTAVO_ISA {

#define OCTAVO_UNROLL_PAIRS

constexpr int kIntegerRows = 4;  // rows times panels at a time
constexpr int kPackedRows = 2;   // of panels as they are packed
constexpr int kPackedPanels = 1;
constexpr int kFloatRegisters = 0;

struct Integers {
    int32_t lane[kLanes];
};
struct Pairs {
    int16_t lane[kLanes][2];
};

constexpr int kLargestByte = 255;
constexpr int kByteRows = 4;

struct Quads {
    uint8_t lane[kLanes][4];
};
struct ByteSums {
    int32_t lane[kLanes];
};

template <class F>
OCTAVO_INLINE Pairs each_half(F f) {
    Pairs pairs;
    for (int i = 0; i < kLanes; ++i) {
        for (int j = 0; j < 2; ++j) {
            pairs.lane[i][j] = static_cast<int16_t>(f(i, j));
        }
    }
    return pairs;
}

OCTAVO_INLINE Vec to_floats(const Integers& v) {
    return each([&](int i) { return static_cast<float>(v.lane[i]); });
}
OCTAVO_INLINE Vec load_half(const std::byte* from) {
    uint16_t bits[kLanes];
    std::memcpy(bits, from, sizeof bits);
    return each([&](int i) { return half_to_float(bits[i]); });
}
OCTAVO_INLINE Pairs load_words(const std::byte* from) {
    Pairs words;
    std::memcpy(&words, from, sizeof words);
    return words;
}
OCTAVO_INLINE void store_words(std::byte* to, const Pairs& v) { std::memcpy(to, &v, sizeof v); }

template <int Bits>
OCTAVO_INLINE Pairs bit_fields(const std::byte* chunk, int index, int to) {
    const Pairs words = load_words(chunk);
    return each_half([&](int i, int j) {
        return (static_cast<uint16_t>(words.lane[i][j]) >> (index * Bits) & ((1 << Bits) - 1))
               << to;
    });
}

OCTAVO_INLINE Pairs signed_bytes(const std::byte* chunk, int index) {
    return each_half(
        [&](int i, int j) { return static_cast<int8_t>(chunk[4 * i + 2 * j + index]); });
}

OCTAVO_INLINE Pairs looked_up(const std::byte* chunk, int index, const int8_t* table) {
    const Pairs codes = bit_fields<4>(chunk, index, 0);
    return each_half([&](int i, int j) { return table[codes.lane[i][j]]; });
}

OCTAVO_INLINE Pairs operator|(const Pairs& a, const Pairs& b) {
    return each_half([&](int i, int j) { return a.lane[i][j] | b.lane[i][j]; });
}
OCTAVO_INLINE Pairs operator*(const Pairs& a, const Pairs& b) {
    return each_half([&](int i, int j) { return a.lane[i][j] * b.lane[i][j]; });
}
OCTAVO_INLINE Pairs less_constant(const Pairs& a, int b) {
    return each_half([&](int i, int j) { return a.lane[i][j] - b; });
}

OCTAVO_INLINE Pairs small_scales(const std::byte* from, int mask) {
    return each_half(
        [&](int i, int) { return static_cast<int8_t>(static_cast<int>(from[i]) & mask); });
}
OCTAVO_INLINE Vec small_minima(const std::byte* from, int shift) {
    return each([&](int i) { return static_cast<float>(static_cast<int>(from[i]) >> shift); });
}

OCTAVO_INLINE Integers multiply_add(Integers sum, const Pairs& w, const std::byte* x) {
    int16_t pair[2];
    std::memcpy(pair, x, sizeof pair);
    for (int i = 0; i < kLanes; ++i) {
        sum.lane[i] += w.lane[i][0] * pair[0] + w.lane[i][1] * pair[1];
    }
    return sum;
}

template <class F>
OCTAVO_INLINE Quads each_byte(const Quads& v, F f) {
    Quads result;
    for (int i = 0; i < kLanes; ++i) {
        for (int j = 0; j < 4; ++j) {
            result.lane[i][j] = static_cast<uint8_t>(f(v.lane[i][j]));
        }
    }
    return result;
}
template <int Bits>
OCTAVO_INLINE Quads low_bytes(const std::byte* chunk, int index) {
    Quads bytes;
    std::memcpy(&bytes, chunk, sizeof bytes);
    return each_byte(bytes, [&](int byte) { return byte >> (index * Bits) & ((1 << Bits) - 1); });
}
OCTAVO_INLINE Quads looked_up(const Quads& codes, const uint8_t* table) {
    return each_byte(codes, [&](int code) { return table[code]; });
}
OCTAVO_INLINE Quads flipped(const Quads& v) {
    return each_byte(v, [](int byte) { return byte ^ 128; });
}

OCTAVO_INLINE ByteSums multiply_add(ByteSums sums, const Quads& w, const std::byte* x) {
    int8_t quad[4];
    std::memcpy(quad, x, sizeof quad);
    for (int i = 0; i < kLanes; ++i) {
        for (int j = 0; j < 4; ++j) {
            sums.lane[i] += w.lane[i][j] * quad[j];
        }
    }
    return sums;
}
OCTAVO_INLINE Integers total(const ByteSums& sums, int32_t less) {
    Integers result;
    for (int i = 0; i < kLanes; ++i) {
        result.lane[i] = sums.lane[i] - less;
    }
    return result;
}

OCTAVO_INLINE Vec small_factors(const std::byte* from) {
    return each([&](int i) { return static_cast<float>(static_cast<int8_t>(from[i])); });
}

OCTAVO_INLINE void store_bytes(const int16_t* q, const uint8_t* order, int8_t* to) {
    for (int i = 0; i < kLanes; ++i) {
        to[i] = static_cast<int8_t>(q[order[i]]);
    }
}

OCTAVO_INLINE int32_t store_rounded(const Vec& biased, int16_t* to) {
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) {
        // The difference is 15 bits, or anything where a number was not finite.
        to[i] = static_cast<int16_t>(std::bit_cast<uint32_t>(biased.lane[i]) -
                                     std::bit_cast<uint32_t>(kRounder));
        sum += to[i];
    }
    return sum;
}

}  // namespace octavo::cpu::OCTAVO_ISA
