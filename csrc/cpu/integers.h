// Dot products of integers: 16 rows of a group of weights with one row of activations.
//
// Weights are unpacked to 16 bits, two columns at a time; activations have 16 bits too. Integers
// have no order: all instruction sets get the same sums. Each header defines
//   Integers           16 of 32 bits
//   Pairs              16 pairs of 16 bits
//   byte_pairs(chunk, i)  pair i of 2 of a quad of 8-bit weights
//   half_pairs(chunk, i)  pair i of 4 of two quads of 4-bit weights, one after the other
//   multiply_add(sum, pairs, x)  sum + both products of each pair with the pair of activations at x
//   to_floats, load_half
#pragma once

#include <cstring>

#include "cpu/groups.h"
#include "cpu/simd.h"

namespace octavo::cpu::OCTAVO_ISA {

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

// How the kernel walks through a group of each packing.
struct Q8Weights {
    static constexpr Packing kPacking = Packing::Q8;
    static constexpr int kChunks = 8;  // of 64 bytes, a quad of columns each
    static constexpr int kPairs = 2;   // of a chunk
    static OCTAVO_INLINE Pairs pairs(const std::byte* chunk, int index) {
        return byte_pairs(chunk, index);
    }
};

struct Q4Weights {
    static constexpr Packing kPacking = Packing::Q4;
    static constexpr int kChunks = 4;  // two quads each
    static constexpr int kPairs = 4;
    static OCTAVO_INLINE Pairs pairs(const std::byte* chunk, int index) {
        return half_pairs(chunk, index);
    }
};

}  // namespace octavo::cpu::OCTAVO_ISA
