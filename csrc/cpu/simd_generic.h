// Vec in plain C++: the definition of every operation, and the path of processors without their
// own.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace octavo::cpu::OCTAVO_ISA {

constexpr int64_t kLanes = 16;
constexpr int kTileRows = 4;      // of the dot kernel: rows at a time,
constexpr int kAccumulators = 4;  // and rows times panels

struct Vec {
    float lane[kLanes];
};

struct Mask {
    bool lane[kLanes];
};

template <class F>
OCTAVO_INLINE Vec each(F f) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) {
        r.lane[i] = f(i);
    }
    return r;
}

OCTAVO_INLINE Vec broadcast(float value) {
    return each([&](int) { return value; });
}
OCTAVO_INLINE Vec load(const float* from) {
    return each([&](int i) { return from[i]; });
}
OCTAVO_INLINE void store(float* to, const Vec& v) {
    for (int i = 0; i < kLanes; ++i) {
        to[i] = v.lane[i];
    }
}
OCTAVO_INLINE Vec load_bf16(const uint16_t* from) {
    return each([&](int i) { return bf16_to_float(from[i]); });
}
OCTAVO_INLINE void store_bf16(uint16_t* to, const Vec& v) {
    for (int i = 0; i < kLanes; ++i) {
        to[i] = float_to_bf16(v.lane[i]);
    }
}

// 16 pairs of bf16 side by side, as a panel holds two columns: first and second of each pair.
OCTAVO_INLINE Vec load_first(const void* from) {
    const auto* pairs = static_cast<const uint16_t*>(from);
    return each([&](int i) { return bf16_to_float(pairs[2 * i]); });
}
OCTAVO_INLINE Vec load_second(const void* from) {
    const auto* pairs = static_cast<const uint16_t*>(from);
    return each([&](int i) { return bf16_to_float(pairs[2 * i + 1]); });
}

// Byte `index` of 16 words of 4 bytes: an integer, times 2^24.
OCTAVO_INLINE Vec load_int8(const void* from, int index) {
    const auto* words = static_cast<const uint32_t*>(from);
    return each([&](int i) {
        const uint32_t top = words[i] << (24 - 8 * index) & 0xff000000U;
        return static_cast<float>(static_cast<int32_t>(top));
    });
}
// The same of 8-bit floats.
template <class Format>
OCTAVO_INLINE Vec load_fp8(const void* from, int index) {
    const auto* words = static_cast<const uint32_t*>(from);
    return each([&](int i) { return Format::widen(words[i] >> 8 * index & 0xffU); });
}

OCTAVO_INLINE Vec operator+(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
OCTAVO_INLINE Vec operator-(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
OCTAVO_INLINE Vec operator*(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
OCTAVO_INLINE Vec operator/(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
// a * b + c, rounded once
OCTAVO_INLINE Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
// b where a lane is NaN
OCTAVO_INLINE Vec min(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
OCTAVO_INLINE Vec max(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
OCTAVO_INLINE Vec abs(const Vec& a) {
    return each([&](int i) { return std::fabs(a.lane[i]); });
}

OCTAVO_INLINE Mask less(const Vec& a, const Vec& b) {
    Mask r;
    for (int i = 0; i < kLanes; ++i) {
        r.lane[i] = a.lane[i] < b.lane[i];
    }
    return r;
}
// Lanes begin <= i < end.
OCTAVO_INLINE Mask lanes_between(int64_t begin, int64_t end) {
    Mask r;
    for (int i = 0; i < kLanes; ++i) {
        r.lane[i] = begin <= i && i < end;
    }
    return r;
}
OCTAVO_INLINE Vec select(const Mask& mask, const Vec& yes, const Vec& no) {
    return each([&](int i) { return mask.lane[i] ? yes.lane[i] : no.lane[i]; });
}

// value * 2^n, where `biased` is n + 1.5 * 2^23, so that its low bits hold n. n is -126 … 127.
OCTAVO_INLINE Vec scale_by_power(const Vec& value, const Vec& biased) {
    return each([&](int i) {
        const uint32_t exponent = (std::bit_cast<uint32_t>(biased.lane[i]) - 0x4b400000U + 127)
                                  << 23;
        return value.lane[i] * std::bit_cast<float>(exponent);
    });
}

// Sum of the lanes, halves onto each other: i and i + 8, i and i + 4, …
OCTAVO_INLINE float reduce_add(Vec v) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            v.lane[i] = v.lane[i] + v.lane[i + half];
        }
    }
    return v.lane[0];
}
OCTAVO_INLINE float reduce_max(Vec v) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            v.lane[i] = v.lane[i] > v.lane[i + half] ? v.lane[i] : v.lane[i + half];
        }
    }
    return v.lane[0];
}
OCTAVO_INLINE float first_lane(const Vec& v) { return v.lane[0]; }

OCTAVO_INLINE void in_turn(Vec&, int64_t&) {}  // registers suffice
OCTAVO_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

}  // namespace octavo::cpu::OCTAVO_ISA
