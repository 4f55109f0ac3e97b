// Dot products of integers with NEON: pairs lie apart, all firsts and all seconds, since each of
// its multiplications takes one number of the activations for all lanes.
#pragma once

namespace octavo::cpu::OCTAVO_ISA {

#define OCTAVO_UNROLL_PAIRS

constexpr int kIntegerRows = 6;  // rows times panels at a time: 24 of the 32 registers are sums
constexpr int kPackedRows = 3;   // of panels as they are packed
constexpr int kPackedPanels = 1;
constexpr int kFloatRegisters = 0;

struct Integers {
    int32x4_t part[4];
};
struct Pairs {
    int16x8_t first[2], second[2];
};

// Sums of 16 bits, of one column of each quad: 8 products of the largest byte with 127 fit.
constexpr int kLargestByte = 32;
constexpr int kByteRows = 3;

struct Quads {
    int8x16_t part[4];
};
struct ByteSums {
    int16x8_t low[4], high[4];
};

template <class F>
OCTAVO_INLINE Pairs each_half(const Pairs& v, F f) {
    return {{f(v.first[0]), f(v.first[1])}, {f(v.second[0]), f(v.second[1])}};
}
template <class F>
OCTAVO_INLINE Pairs each_half(const Pairs& a, const Pairs& b, F f) {
    return {{f(a.first[0], b.first[0]), f(a.first[1], b.first[1])},
            {f(a.second[0], b.second[0]), f(a.second[1], b.second[1])}};
}

OCTAVO_INLINE Vec to_floats(Integers v) {
    return each([&](int i) { return vcvtq_f32_s32(v.part[i]); });
}
OCTAVO_INLINE Vec load_half(const std::byte* from) {
    const auto* bits = reinterpret_cast<const uint16_t*>(from);
    return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(bits + 4 * i))); });
}
OCTAVO_INLINE Pairs load_words(const std::byte* from) {
    const auto* halves = reinterpret_cast<const int16_t*>(from);
    const int16x8x2_t low = vld2q_s16(halves);
    const int16x8x2_t high = vld2q_s16(halves + 16);
    return {{low.val[0], high.val[0]}, {low.val[1], high.val[1]}};
}
OCTAVO_INLINE void store_words(std::byte* to, const Pairs& v) {
    auto* halves = reinterpret_cast<int16_t*>(to);
    const int16x8x2_t low = {{v.first[0], v.second[0]}};
    const int16x8x2_t high = {{v.first[1], v.second[1]}};
    vst2q_s16(halves, low);
    vst2q_s16(halves + 16, high);
}

template <int Bits>
OCTAVO_INLINE Pairs bit_fields(const std::byte* chunk, int index, int to) {
    const int16x8_t by = vdupq_n_s16(static_cast<int16_t>(to - index * Bits));
    const uint16x8_t mask = vdupq_n_u16(static_cast<uint16_t>(((1 << Bits) - 1) << to));
    return each_half(load_words(chunk), [&](int16x8_t words) {
        const uint16x8_t moved = vshlq_u16(vreinterpretq_u16_s16(words), by);
        return vreinterpretq_s16_u16(vandq_u16(moved, mask));
    });
}

OCTAVO_INLINE int16x8_t low_byte(int16x8_t words) { return vshrq_n_s16(vshlq_n_s16(words, 8), 8); }
OCTAVO_INLINE Pairs signed_bytes(const std::byte* chunk, int index) {
    return each_half(load_words(chunk), [&](int16x8_t words) {
        return index == 0 ? low_byte(words) : vshrq_n_s16(words, 8);
    });
}

OCTAVO_INLINE Pairs looked_up(const std::byte* chunk, int index, const int8_t* table) {
    const int8x16_t entries = vld1q_s8(table);
    return each_half(bit_fields<4>(chunk, index, 0), [&](int16x8_t codes) {
        return low_byte(vreinterpretq_s16_s8(vqtbl1q_s8(entries, vreinterpretq_u8_s16(codes))));
    });
}

OCTAVO_INLINE Pairs operator|(const Pairs& a, const Pairs& b) {
    return each_half(a, b, [](int16x8_t x, int16x8_t y) { return vorrq_s16(x, y); });
}
OCTAVO_INLINE Pairs operator*(const Pairs& a, const Pairs& b) {
    return each_half(a, b, [](int16x8_t x, int16x8_t y) { return vmulq_s16(x, y); });
}
OCTAVO_INLINE Pairs less_constant(const Pairs& a, int b) {
    const int16x8_t constant = vdupq_n_s16(static_cast<int16_t>(b));
    return each_half(a, [&](int16x8_t x) { return vsubq_s16(x, constant); });
}

OCTAVO_INLINE Pairs small_scales(const std::byte* from, int mask) {
    const int8x16_t bytes = vandq_s8(vld1q_s8(reinterpret_cast<const int8_t*>(from)),
                                     vdupq_n_s8(static_cast<int8_t>(mask)));
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes));
    const int16x8_t high = vmovl_s8(vget_high_s8(bytes));
    return {{low, high}, {low, high}};
}
OCTAVO_INLINE Vec small_minima(const std::byte* from, int shift) {
    const uint8x16_t bytes = vshlq_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(from)),
                                      vdupq_n_s8(static_cast<int8_t>(-shift)));
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes));
    const uint16x8_t high = vmovl_u8(vget_high_u8(bytes));
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
             vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
             vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}

OCTAVO_INLINE Integers multiply_add(Integers sum, const Pairs& w, const std::byte* x) {
    const int16x4_t pair = vreinterpret_s16_s32(vdup_n_s32(load_word(x)));
    for (int i = 0; i < 2; ++i) {
        int32x4_t& low = sum.part[2 * i];
        int32x4_t& high = sum.part[2 * i + 1];
        low = vmlal_lane_s16(low, vget_low_s16(w.first[i]), pair, 0);
        low = vmlal_lane_s16(low, vget_low_s16(w.second[i]), pair, 1);
        high = vmlal_high_lane_s16(high, w.first[i], pair, 0);
        high = vmlal_high_lane_s16(high, w.second[i], pair, 1);
    }
    return sum;
}

template <int Bits>
OCTAVO_INLINE Quads low_bytes(const std::byte* chunk, int index) {
    static_assert(Bits == 4);
    const auto* from = reinterpret_cast<const uint8_t*>(chunk);
    Quads codes;
    for (int i = 0; i < 4; ++i) {
        const uint8x16_t bytes = vld1q_u8(from + 16 * i);
        codes.part[i] = vreinterpretq_s8_u8(index == 0 ? vandq_u8(bytes, vdupq_n_u8(15))  //
                                                       : vshrq_n_u8(bytes, 4));
    }
    return codes;
}
OCTAVO_INLINE Quads looked_up(Quads codes, const uint8_t* table) {
    const int8x16_t entries = vreinterpretq_s8_u8(vld1q_u8(table));
    for (int8x16_t& part : codes.part) {
        part = vqtbl1q_s8(entries, vreinterpretq_u8_s8(part));
    }
    return codes;
}

OCTAVO_INLINE ByteSums multiply_add(ByteSums sums, const Quads& w, const std::byte* x) {
    const int8x8_t quads = vreinterpret_s8_s32(vdup_n_s32(load_word(x)));
    for (int i = 0; i < 4; ++i) {
        sums.low[i] = vmlal_s8(sums.low[i], vget_low_s8(w.part[i]), quads);
        sums.high[i] = vmlal_s8(sums.high[i], vget_high_s8(w.part[i]), quads);
    }
    return sums;
}
OCTAVO_INLINE Integers total(const ByteSums& sums, int32_t less) {
    Integers result;
    for (int i = 0; i < 4; ++i) {
        const int32x4_t of_rows = vpaddq_s32(vpaddlq_s16(sums.low[i]), vpaddlq_s16(sums.high[i]));
        result.part[i] = vsubq_s32(of_rows, vdupq_n_s32(less));
    }
    return result;
}

OCTAVO_INLINE Vec small_factors(const std::byte* from) {
    const int8x16_t bytes = vld1q_s8(reinterpret_cast<const int8_t*>(from));
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes));
    const int16x8_t high = vmovl_s8(vget_high_s8(bytes));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}

OCTAVO_INLINE void store_bytes(const int16_t* q, const uint8_t* order, int8_t* to) {
    const int8x16_t bytes = vcombine_s8(vmovn_s16(vld1q_s16(q)), vmovn_s16(vld1q_s16(q + 8)));
    vst1q_s8(to, vqtbl1q_s8(bytes, vld1q_u8(order)));
}

OCTAVO_INLINE int32_t store_rounded(Vec biased, int16_t* to) {
    const int32x4_t bias = vreinterpretq_s32_f32(vdupq_n_f32(kRounder));
    int32x4_t sum = vdupq_n_s32(0);
    for (int i = 0; i < 4; ++i) {
        const int32x4_t wide = vsubq_s32(vreinterpretq_s32_f32(biased.part[i]), bias);
        vst1_s16(to + 4 * i, vmovn_s32(wide));
        sum = vaddq_s32(sum, wide);
    }
    return vaddvq_s32(sum);
}

}  // namespace octavo::cpu::OCTAVO_ISA
