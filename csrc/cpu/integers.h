// Dot products of integers: 16 rows of a group of weights with one row of activations.
//
// Weights are unpacked to 16 bits, two columns at a time, with their small scales already in them;
// activations have 15 bits. Integers have no order: all instruction sets get the same sums. Each
// header defines
//   Integers           16 of 32 bits
//   Pairs              16 pairs of 16 bits
//   bit_fields<Bits>(chunk, i, to)  pair i of a plane's chunk, moved up to bit `to`
//   signed_bytes(chunk, i)          the same of 8 bits with a sign
//   looked_up(chunk, i, table)      the same of 4 bits, which choose entries of the table
//   small_scales, small_minima      16 rows' bytes as pairs of equals, and as floats
//   multiply_add(sum, pairs, x)     sum + both products of each pair with the pair at x
//   store_rounded(biased, to)       numbers that kRounder was added to, as 16-bit integers; their
//                                   sum
//   to_floats, load_half, load_words, store_words
//
// Activations of 8 bits meet codes as bytes, four columns at a time and without unpacking, where
// the instruction set has something for them; the rest takes them as 16 bits. For bytes:
//   kLargestByte       the largest of a code that 32 products' sums have room for
//   kByteRows          rows at a time
//   Quads, ByteSums    16 words of four bytes; what sums products of them
//   low_bytes<Bits>(chunk, i)          bits i * Bits … of each byte
//   looked_up(quads, table), flipped   bytes as the table's, and with their highest bit inverted
//   multiply_add(sums, quads, x)       sums + the products of each quad with the one at x
//   total(sums, less)                  as Integers, less that number
//   small_factors                      16 rows' bytes with a sign, as floats
//   store_bytes(q, order, to)          16 integers of 16 bits as bytes, in that order
#pragma once

#include <cstring>

#include "common/half.h"
#include "cpu/groups.h"
#include "cpu/simd.h"

namespace octavo::cpu::OCTAVO_ISA {

constexpr float kRounder = 0x1.8p23F;  // added to a number: the low bits are its nearest integer

OCTAVO_INLINE int32_t load_word(const std::byte* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return word;
}

}  // namespace octavo::cpu::OCTAVO_ISA

#if defined(OCTAVO_NEON)  // not __ARM_NEON: the generic set must stay without it
#include "cpu/integers_neon.h"
#elif defined(__AVX512F__)
#include "cpu/integers_avx512.h"
#elif defined(__AVX2__)
#include "cpu/integers_avx2.h"
#else
#include "cpu/integers_generic.h"
#endif

namespace octavo::cpu::OCTAVO_ISA {

#ifndef __AVX512F__
// Of 16 rows' exponents, as power_scale.
OCTAVO_INLINE Vec power_scales(const std::byte* from) {
    float scales[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        scales[i] = power_scale(static_cast<uint8_t>(from[i]));
    }
    return load(scales);
}
#endif

template <int Bits>
OCTAVO_INLINE Pairs plane_pairs(const std::byte* plane, int64_t pair, int to) {
    constexpr int kFields = 16 / Bits;
    return bit_fields<Bits>(plane + pair / kFields * kChunkBytes, static_cast<int>(pair % kFields),
                            to);
}

// Whether this set multiplies the format's codes as bytes.
constexpr bool takes_bytes(const Format& format) {
    return format.is_integer() && format.bits >= 4 && format.high_bits() == 0 && format.subs == 1 &&
           code_bytes(format).largest <= kLargestByte;
}

// A group of 16 rows as it is packed.
template <Packing kPacking>
class PackedGroup {
  public:
    static constexpr Format kFormat = format_of(kPacking);
    static constexpr CodeBytes kBytes = code_bytes(kFormat);
    static constexpr int kMinima = kFormat.has_minima ? kFormat.subs : 0;
    static constexpr int kSums = kFormat.sums();

    OCTAVO_INLINE PackedGroup(const std::byte* panel, const std::byte* block,
                              const std::byte* group)
        : panel_(panel), block_(block), group_(group) {
        if constexpr (kFormat.has_small()) {
            for (int sub = 0; sub < kFormat.subs; ++sub) {
                small_[sub] = small_scales(small(sub), kSmallMask);
            }
        }
    }

    // 16 rows' two columns, with their small scales.
    OCTAVO_INLINE Pairs pair(int64_t index) const {
        if constexpr (kFormat.has_small()) {
            return integers(index) * small_[index * kFormat.subs / kGroupPairs];
        } else {
            return integers(index);
        }
    }

    // 16 rows' four columns, as bytes; which ones, kQuadOrder says.
    OCTAVO_INLINE Quads quad(int64_t index) const {
        constexpr int kQuads = 8 / kFormat.bits;  // of a chunk
        // Not every set has all of these functions: `auto` looks for them where one is needed.
        const auto codes = low_bytes<kFormat.bits>(group_ + index / kQuads * kChunkBytes,
                                                   static_cast<int>(index % kQuads));
        if constexpr (kFormat.codes == Codes::Signed) {
            return flipped(codes);
        } else if constexpr (kFormat.codes >= Codes::Nonlinear) {
            uint8_t table[16];
            for (int code = 0; code < 16; ++code) {
                table[code] = static_cast<uint8_t>(integer_of(kFormat, code) + kBytes.offset);
            }
            return looked_up(codes, table);
        } else {
            return codes;
        }
    }

    // The same columns without.
    OCTAVO_INLINE Pairs integers(int64_t index) const {
        if constexpr (kFormat.codes == Codes::Signed) {
            return signed_bytes(group_ + index / 2 * kChunkBytes, static_cast<int>(index % 2));
        } else if constexpr (kFormat.codes >= Codes::Nonlinear) {
            const int8_t* table = kFormat.codes == Codes::Nonlinear ? kNonlinear : kFloat4;
            return looked_up(group_ + index / 4 * kChunkBytes, static_cast<int>(index % 4), table);
        } else {
            Pairs codes = plane_pairs<kFormat.low_bits()>(group_, index, 0);
            if constexpr (kFormat.high_bits() != 0) {
                codes = codes | plane_pairs<kFormat.high_bits()>(group_ + kFormat.high_plane(),
                                                                 index, kFormat.low_bits());
            }
            if constexpr (kFormat.codes == Codes::Centred) {
                codes = less_constant(codes, 1 << (kFormat.bits - 1));
            }
            return codes;
        }
    }

    // What is in a pair already, and not in a quad.
    OCTAVO_INLINE Vec small_scale() const {
        return small_factors(group_ + kFormat.scales_offset());
    }

    // The small scales of one sub, as they are packed.
    static constexpr int kSmallMask = kFormat.scales == Scales::Nibbles ? 15 : 255;
    OCTAVO_INLINE const std::byte* small(int sub) const {
        return group_ + kFormat.scales_offset() + sub * kPanelRows;
    }

    // Of one of kSums.
    OCTAVO_INLINE Vec scale(int sum) const {
        if constexpr (kFormat.has_factors()) {
            uint16_t halves[kLanes];
            const std::byte* from = group_ + kFormat.scales_offset() + sum * kPanelRows;
            for (int i = 0; i < kLanes; ++i) {
                halves[i] = e4m3_to_half(static_cast<uint8_t>(from[i]));
            }
            return load_half(reinterpret_cast<const std::byte*>(halves)) *
                   broadcast(kE4m3OverHalf) * load(reinterpret_cast<const float*>(panel_));
        } else if constexpr (kFormat.scales == Scales::Power) {
            return power_scales(group_ + kFormat.scales_offset());
        } else {
            return load_half(kFormat.has_small() ? block_ : group_ + kFormat.scales_offset());
        }
    }

    OCTAVO_INLINE Vec minimum(int sub) const {
        if constexpr (kFormat.has_small()) {
            constexpr int kShift = kFormat.scales == Scales::Nibbles ? 4 : 0;
            return load_half(block_ + kHalvesBytes) *
                   small_minima(group_ + kFormat.minima_offset() + sub * kPanelRows, kShift);
        } else {
            return load_half(group_ + kFormat.minima_offset());
        }
    }

  private:
    const std::byte* const panel_;
    const std::byte* const block_;
    const std::byte* const group_;
    Pairs small_[2];
};

}  // namespace octavo::cpu::OCTAVO_ISA
