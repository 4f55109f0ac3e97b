// Dot products of integers with NEON: pairs lie apart, all firsts and all seconds, since each of
// its multiplications takes one number of the activations for all lanes.
#pragma once

namespace octavo::cpu::OCTAVO_ISA {

constexpr int kIntegerRows = 6;  // rows of activations at a time: 24 of the 32 registers are sums

struct Integers {
    int32x4_t part[4];
};
struct Pairs {
    int16x8_t first[2], second[2];
};

OCTAVO_INLINE Vec to_floats(Integers v) {
    return each([&](int i) { return vcvtq_f32_s32(v.part[i]); });
}
OCTAVO_INLINE Vec load_half(const std::byte* from) {
    const auto* bits = reinterpret_cast<const uint16_t*>(from);
    return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(bits + 4 * i))); });
}

OCTAVO_INLINE Pairs widened(int8x16_t first, int8x16_t second) {
    return {{vmovl_s8(vget_low_s8(first)), vmovl_s8(vget_high_s8(first))},
            {vmovl_s8(vget_low_s8(second)), vmovl_s8(vget_high_s8(second))}};
}
OCTAVO_INLINE Pairs byte_pairs(const std::byte* chunk, int index) {
    const int8x16x4_t bytes = vld4q_s8(reinterpret_cast<const int8_t*>(chunk));
    return widened(bytes.val[index], bytes.val[index + 2]);
}
OCTAVO_INLINE int8x16_t half_bytes(uint8x16_t quads, int index) {
    return vreinterpretq_s8_u8(index < 2 ? vandq_u8(quads, vdupq_n_u8(15)) : vshrq_n_u8(quads, 4));
}
OCTAVO_INLINE Pairs half_pairs(const std::byte* chunk, int index) {
    const uint8x16x4_t bytes = vld4q_u8(reinterpret_cast<const uint8_t*>(chunk));
    return widened(half_bytes(bytes.val[index % 2], index),
                   half_bytes(bytes.val[index % 2 + 2], index));
}

OCTAVO_INLINE Integers multiply_add(Integers sum, Pairs w, const std::byte* x) {
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

}  // namespace octavo::cpu::OCTAVO_ISA
