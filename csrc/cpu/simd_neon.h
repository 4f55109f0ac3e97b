// Vec as four 128-bit registers: NEON, as every 64-bit Arm processor has it.
#pragma once

#ifndef OCTAVO_EMULATE
#include <arm_neon.h>
#endif

#include <cstdint>

namespace octavo::cpu::OCTAVO_ISA {

constexpr int64_t kLanes = 16;
constexpr int kTileRows = 6;      // of the dot kernel: rows at a time,
constexpr int kAccumulators = 6;  // and rows times panels: 24 of the 32 registers

struct Vec {
    float32x4_t part[4];
};

struct Mask {
    uint32x4_t part[4];
};

template <class F>
OCTAVO_INLINE Vec each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}
template <class F>
OCTAVO_INLINE Mask each_mask(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}

OCTAVO_INLINE Vec broadcast(float value) {
    const float32x4_t v = vdupq_n_f32(value);
    return {{v, v, v, v}};
}
OCTAVO_INLINE Vec load(const float* from) {
    return each([&](int i) { return vld1q_f32(from + 4 * i); });
}
OCTAVO_INLINE void store(float* to, Vec v) {
    for (int i = 0; i < 4; ++i) {
        vst1q_f32(to + 4 * i, v.part[i]);
    }
}

OCTAVO_INLINE Vec load_bf16(const uint16_t* from) {
    return each(
        [&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16)); });
}
OCTAVO_INLINE void store_bf16(uint16_t* to, Vec v) {
    for (int i = 0; i < 4; ++i) {
        const uint32x4_t bits = vreinterpretq_u32_f32(v.part[i]);
        const uint32x4_t top = vshrq_n_u32(bits, 16);
        const uint32x4_t odd = vandq_u32(top, vdupq_n_u32(1));
        const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0x7fff));
        const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, bias), 16);
        const uint32x4_t quiet = vorrq_u32(top, vdupq_n_u32(0x40));
        const uint32x4_t is_number = vceqq_f32(v.part[i], v.part[i]);
        vst1_u16(to + 4 * i, vmovn_u32(vbslq_u32(is_number, rounded, quiet)));
    }
}

// 16 pairs of bf16 side by side, as a panel holds two columns: first and second of each pair.
OCTAVO_INLINE Vec load_first(const void* from) {
    const auto* bits = static_cast<const uint32_t*>(from);
    return each(
        [&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32(bits + 4 * i), 16)); });
}
OCTAVO_INLINE Vec load_second(const void* from) {
    const auto* bits = static_cast<const uint32_t*>(from);
    return each([&](int i) {
        return vreinterpretq_f32_u32(vandq_u32(vld1q_u32(bits + 4 * i), vdupq_n_u32(0xffff0000U)));
    });
}

// Byte `index` of 4 words of 4 bytes, with zeros below.
OCTAVO_INLINE int32x4_t top_byte(const uint32_t* words, int index) {
    const uint32x4_t moved = vshlq_u32(vld1q_u32(words), vdupq_n_s32(24 - 8 * index));
    return vreinterpretq_s32_u32(vandq_u32(moved, vdupq_n_u32(0xff000000U)));
}
// Byte `index` of 16 words: an integer, times 2^24.
OCTAVO_INLINE Vec load_int8(const void* from, int index) {
    const auto* words = static_cast<const uint32_t*>(from);
    return each([&](int i) { return vcvtq_f32_s32(top_byte(words + 4 * i, index)); });
}
// The same of 8-bit floats.
template <class Format>
OCTAVO_INLINE Vec load_fp8(const void* from, int index) {
    const auto* words = static_cast<const uint32_t*>(from);
    const uint32x4_t mask = vdupq_n_u32(static_cast<uint32_t>(Format::kMask) << 16);
    return each([&](int i) {
        const int32x4_t moved = vshrq_n_s32(top_byte(words + 4 * i, index), Format::kShift);
        const uint32x4_t bits = vandq_u32(vreinterpretq_u32_s32(moved), mask);
        return vmulq_f32(vreinterpretq_f32_u32(bits), vdupq_n_f32(Format::kFactor));
    });
}

OCTAVO_INLINE Vec operator+(Vec a, Vec b) {
    return each([&](int i) { return vaddq_f32(a.part[i], b.part[i]); });
}
OCTAVO_INLINE Vec operator-(Vec a, Vec b) {
    return each([&](int i) { return vsubq_f32(a.part[i], b.part[i]); });
}
OCTAVO_INLINE Vec operator*(Vec a, Vec b) {
    return each([&](int i) { return vmulq_f32(a.part[i], b.part[i]); });
}
OCTAVO_INLINE Vec operator/(Vec a, Vec b) {
    return each([&](int i) { return vdivq_f32(a.part[i], b.part[i]); });
}
// a * b + c, rounded once
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return each([&](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); });
}
// b where a lane is NaN, which NEON's own minimum and maximum are not
OCTAVO_INLINE float32x4_t lower(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vcltq_f32(a, b), a, b);
}
OCTAVO_INLINE float32x4_t higher(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
OCTAVO_INLINE Vec min(Vec a, Vec b) {
    return each([&](int i) { return lower(a.part[i], b.part[i]); });
}
OCTAVO_INLINE Vec max(Vec a, Vec b) {
    return each([&](int i) { return higher(a.part[i], b.part[i]); });
}
OCTAVO_INLINE Vec abs(Vec a) {
    return each([&](int i) { return vabsq_f32(a.part[i]); });
}

OCTAVO_INLINE Mask less(Vec a, Vec b) {
    return each_mask([&](int i) { return vcltq_f32(a.part[i], b.part[i]); });
}
// Lanes begin <= i < end.
OCTAVO_INLINE Mask lanes_between(int64_t begin, int64_t end) {
    static constexpr int32_t kIndices[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                 8, 9, 10, 11, 12, 13, 14, 15};
    const int32x4_t from = vdupq_n_s32(static_cast<int32_t>(begin));
    const int32x4_t to = vdupq_n_s32(static_cast<int32_t>(end));
    return each_mask([&](int i) {
        const int32x4_t index = vld1q_s32(kIndices + 4 * i);
        return vandq_u32(vcgeq_s32(index, from), vcltq_s32(index, to));
    });
}
OCTAVO_INLINE Vec select(Mask mask, Vec yes, Vec no) {
    return each([&](int i) { return vbslq_f32(mask.part[i], yes.part[i], no.part[i]); });
}

// value * 2^n, where `biased` is n + 1.5 * 2^23, so that its low bits hold n. n is -126 … 127.
OCTAVO_INLINE Vec scale_by_power(Vec value, Vec biased) {
    const int32x4_t offset = vdupq_n_s32(0x4b400000 - 127);
    return each([&](int i) {
        const int32x4_t exponent = vsubq_s32(vreinterpretq_s32_f32(biased.part[i]), offset);
        return vmulq_f32(value.part[i], vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
    });
}

// Sum of the lanes, halves onto each other: i and i + 8, i and i + 4, …
OCTAVO_INLINE float reduce_add(Vec v) {
    const float32x4_t four =
        vaddq_f32(vaddq_f32(v.part[0], v.part[2]), vaddq_f32(v.part[1], v.part[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
OCTAVO_INLINE float reduce_max(Vec v) {
    const float32x4_t four = higher(higher(v.part[0], v.part[2]), higher(v.part[1], v.part[3]));
    const float32x4_t two = higher(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(higher(two, vextq_f32(two, two, 1)), 0);
}
OCTAVO_INLINE float first_lane(Vec v) { return vgetq_lane_f32(v.part[0], 0); }

OCTAVO_INLINE void in_turn(Vec&, int64_t&) {}  // registers suffice
OCTAVO_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

}  // namespace octavo::cpu::OCTAVO_ISA
