// Dot products of integers with AVX2.
#pragma once

namespace octavo::cpu::OCTAVO_ISA {

constexpr int kIntegerRows = 6;  // rows of activations at a time: 12 of the 16 registers are sums

struct Integers {
    __m256i low, high;
};
using Pairs = Integers;

OCTAVO_INLINE Vec to_floats(Integers v) {
    return {_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)};
}
OCTAVO_INLINE Vec load_half(const std::byte* from) {
    const auto* bits = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(bits)), _mm256_cvtph_ps(_mm_loadu_si128(bits + 1))};
}
OCTAVO_INLINE Integers load_chunk(const std::byte* from) {
    const auto* bits = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(bits), _mm256_loadu_si256(bits + 1)};
}

OCTAVO_INLINE Pairs byte_pairs(const std::byte* chunk, int index) {
    Integers quad = load_chunk(chunk);
    if (index == 0) {
        quad = {_mm256_slli_epi16(quad.low, 8), _mm256_slli_epi16(quad.high, 8)};
    }
    return {_mm256_srai_epi16(quad.low, 8), _mm256_srai_epi16(quad.high, 8)};
}

OCTAVO_INLINE __m256i half_bytes(__m256i quads, int index) {
    const __m256i mask = _mm256_set1_epi16(15);
    switch (index) {
        case 0:
            return _mm256_and_si256(quads, mask);
        case 1:
            return _mm256_and_si256(_mm256_srli_epi16(quads, 8), mask);
        case 2:
            return _mm256_and_si256(_mm256_srli_epi16(quads, 4), mask);
        default:
            return _mm256_srli_epi16(quads, 12);
    }
}
OCTAVO_INLINE Pairs half_pairs(const std::byte* chunk, int index) {
    const Integers quads = load_chunk(chunk);
    return {half_bytes(quads.low, index), half_bytes(quads.high, index)};
}

OCTAVO_INLINE Integers multiply_add(Integers sum, Pairs w, const std::byte* x) {
    const __m256i pair = _mm256_set1_epi32(load_word(x));
    sum = {_mm256_add_epi32(sum.low, _mm256_madd_epi16(w.low, pair)),
           _mm256_add_epi32(sum.high, _mm256_madd_epi16(w.high, pair))};
    // Left alone, the compiler multiplies for all rows first and adds later, with more values under
    // way than there are registers.
    asm volatile("" : "+x"(sum.low), "+x"(sum.high));
    return sum;
}

}  // namespace octavo::cpu::OCTAVO_ISA
