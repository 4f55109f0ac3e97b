// Dot products of integers with AVX-512, and with its instruction for just that (VNNI). Not run
// when written: see simd_avx512.h.
#pragma once

namespace octavo::cpu::OCTAVO_ISA {

constexpr int kIntegerRows = 12;  // rows of activations at a time

struct Integers {
    __m512i all;
};
using Pairs = Integers;

OCTAVO_INLINE Vec to_floats(Integers v) { return {_mm512_cvtepi32_ps(v.all)}; }
OCTAVO_INLINE Vec load_half(const std::byte* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}

OCTAVO_INLINE Pairs byte_pairs(const std::byte* chunk, int index) {
    __m512i quad = _mm512_loadu_si512(chunk);
    if (index == 0) {
        quad = _mm512_slli_epi16(quad, 8);
    }
    return {_mm512_srai_epi16(quad, 8)};
}

OCTAVO_INLINE Pairs half_pairs(const std::byte* chunk, int index) {
    const __m512i quads = _mm512_loadu_si512(chunk);
    const __m512i mask = _mm512_set1_epi16(15);
    switch (index) {
        case 0:
            return {_mm512_and_si512(quads, mask)};
        case 1:
            return {_mm512_and_si512(_mm512_srli_epi16(quads, 8), mask)};
        case 2:
            return {_mm512_and_si512(_mm512_srli_epi16(quads, 4), mask)};
        default:
            return {_mm512_srli_epi16(quads, 12)};
    }
}

OCTAVO_INLINE Integers multiply_add(Integers sum, Pairs w, const std::byte* x) {
    const __m512i pair = _mm512_set1_epi32(load_word(x));
#ifdef __AVX512VNNI__
    sum.all = _mm512_dpwssd_epi32(sum.all, w.all, pair);
#else
    sum.all = _mm512_add_epi32(sum.all, _mm512_madd_epi16(w.all, pair));
#endif
#ifndef OCTAVO_EMULATE                 // no register of this processor holds it
    asm volatile("" : "+v"(sum.all));  // as in integers_avx2.h
#endif
    return sum;
}

}  // namespace octavo::cpu::OCTAVO_ISA
