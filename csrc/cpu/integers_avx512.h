// Dot products of integers with AVX-512, and with its instruction for just that (VNNI).
#pragma once

namespace octavo::cpu::OCTAVO_ISA {

// Fields of words are taken by shifts that are known when compiled.
#define OCTAVO_UNROLL_PAIRS OCTAVO_UNROLL

constexpr int kIntegerRows = 24;     // rows times panels at a time
constexpr int kPackedRows = 8;       // of panels as they are packed
constexpr int kPackedPanels = 2;     // of them
constexpr int kFloatRegisters = 16;  // rows times panels whose floats are in registers too

struct Integers {
    __m512i all;
};
using Pairs = Integers;

#ifdef __AVX512VNNI__
constexpr int kLargestByte = 255;
#else
constexpr int kLargestByte = 15;  // as in integers_avx2.h
#endif
constexpr int kByteRows = 8;

struct Quads {
    __m512i all;
};
struct ByteSums {
    __m512i all;
};

OCTAVO_INLINE Vec to_floats(Integers v) { return {_mm512_cvtepi32_ps(v.all)}; }
OCTAVO_INLINE Vec load_half(const std::byte* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
OCTAVO_INLINE Integers load_words(const std::byte* from) { return {_mm512_loadu_si512(from)}; }
OCTAVO_INLINE void store_words(std::byte* to, Integers v) { _mm512_storeu_si512(to, v.all); }

template <int Bits>
OCTAVO_INLINE Pairs bit_fields(const std::byte* chunk, int index, int to) {
    constexpr int kMask = (1 << Bits) - 1;
    const int from = index * Bits;
    const __m512i words = _mm512_loadu_si512(chunk);
    const __m512i moved = from >= to ? _mm512_srli_epi16(words, static_cast<unsigned>(from - to))
                                     : _mm512_slli_epi16(words, static_cast<unsigned>(to - from));
    if (from + Bits == 16 && to == 0) {
        return {moved};  // the shift has cleared the rest
    }
    return {_mm512_and_si512(moved, _mm512_set1_epi16(static_cast<int16_t>(kMask << to)))};
}

OCTAVO_INLINE Pairs signed_bytes(Integers words, int index) {
    if (index == 0) {
        words = {_mm512_slli_epi16(words.all, 8)};
    }
    return {_mm512_srai_epi16(words.all, 8)};
}
OCTAVO_INLINE Pairs signed_bytes(const std::byte* chunk, int index) {
    return signed_bytes(load_words(chunk), index);
}

OCTAVO_INLINE Pairs looked_up(const std::byte* chunk, int index, const int8_t* table) {
    const __m512i entries =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    __m512i words = _mm512_loadu_si512(chunk);
    if (index % 2 == 1) {
        words = _mm512_srli_epi16(words, 4);
    }
    const __m512i codes = _mm512_and_si512(words, _mm512_set1_epi8(15));
    return signed_bytes(Integers{_mm512_shuffle_epi8(entries, codes)}, index / 2);
}

OCTAVO_INLINE Pairs operator|(Pairs a, Pairs b) { return {_mm512_or_si512(a.all, b.all)}; }
OCTAVO_INLINE Pairs operator*(Pairs a, Pairs b) { return {_mm512_mullo_epi16(a.all, b.all)}; }
OCTAVO_INLINE Pairs less_constant(Pairs a, int b) {
    return {_mm512_sub_epi16(a.all, _mm512_set1_epi16(static_cast<int16_t>(b)))};
}

OCTAVO_INLINE Pairs small_scales(const std::byte* from, int mask) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m512i wide =
        _mm512_cvtepi8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(static_cast<int8_t>(mask))));
    return {_mm512_or_si512(_mm512_and_si512(wide, _mm512_set1_epi32(0xffff)),
                            _mm512_slli_epi32(wide, 16))};
}
OCTAVO_INLINE Vec small_minima(const std::byte* from, int shift) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm512_cvtepi32_ps(
        _mm512_srli_epi32(_mm512_cvtepu8_epi32(bytes), static_cast<unsigned>(shift)))};
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

template <int Bits>
OCTAVO_INLINE Quads low_bytes(const std::byte* chunk, int index) {
    __m512i words = _mm512_loadu_si512(chunk);
    if (Bits == 8) {
        return {words};
    }
    if (index == 1) {
        words = _mm512_srli_epi16(words, 4);
    }
    return {_mm512_and_si512(words, _mm512_set1_epi8(15))};
}
OCTAVO_INLINE Quads looked_up(Quads codes, const uint8_t* table) {
    const __m512i entries =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm512_shuffle_epi8(entries, codes.all)};
}
OCTAVO_INLINE Quads flipped(Quads v) { return {_mm512_xor_si512(v.all, _mm512_set1_epi8(-128))}; }

OCTAVO_INLINE ByteSums multiply_add(ByteSums sums, Quads w, const std::byte* x) {
    const __m512i quad = _mm512_set1_epi32(load_word(x));
#ifdef __AVX512VNNI__
    sums.all = _mm512_dpbusd_epi32(sums.all, w.all, quad);
#else
    sums.all = _mm512_add_epi16(sums.all, _mm512_maddubs_epi16(w.all, quad));
#endif
#ifndef OCTAVO_EMULATE
    asm volatile("" : "+v"(sums.all));  // as above
#endif
    return sums;
}
OCTAVO_INLINE Integers total(ByteSums sums, int32_t less) {
#ifndef __AVX512VNNI__
    sums.all = _mm512_madd_epi16(sums.all, _mm512_set1_epi16(1));
#endif
    return {_mm512_sub_epi32(sums.all, _mm512_set1_epi32(less))};
}

OCTAVO_INLINE Vec small_factors(const std::byte* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}

// Of 16 rows' exponents, as power_scale: below 2 they give subnormal numbers.
OCTAVO_INLINE Vec power_scales(const std::byte* from) {
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m512i one = _mm512_set1_epi32(1);
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, one), 23);
    const __m512i subnormal = _mm512_slli_epi32(_mm512_add_epi32(e, one), 21);
    const __mmask16 is_low = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    return {_mm512_castsi512_ps(_mm512_mask_blend_epi32(is_low, normal, subnormal))};
}

OCTAVO_INLINE void store_bytes(const int16_t* q, const uint8_t* order, int8_t* to) {
    const auto* from = reinterpret_cast<const __m128i*>(q);
    const __m128i bytes = _mm_packs_epi16(_mm_loadu_si128(from), _mm_loadu_si128(from + 1));
    const __m128i places = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(bytes, places));
}

OCTAVO_INLINE int32_t store_rounded(Vec biased, int16_t* to) {
    const __m512i bias = _mm512_castps_si512(_mm512_set1_ps(kRounder));
    const __m512i integers = _mm512_sub_epi32(_mm512_castps_si512(biased.all), bias);
    const __m256i packed = _mm512_cvtsepi32_epi16(integers);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
    const __m256i pairs = _mm256_madd_epi16(packed, _mm256_set1_epi16(1));
    return _mm512_reduce_add_epi32(_mm512_zextsi256_si512(pairs));
}

}  // namespace octavo::cpu::OCTAVO_ISA
