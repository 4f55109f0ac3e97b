// Vec as one 512-bit register: AVX-512 F, BW, VL, DQ.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace octavo::cpu::OCTAVO_ISA {

constexpr int64_t kLanes = 16;
// Rows at a time in the dot kernel: of twelve, the pointers need more than the general registers,
// and it takes a quarter longer.
constexpr int kTileRows = 8;
constexpr int kAccumulators = 24;  // rows times panels: of the 32 registers

struct Vec {
    __m512 all;
};

struct Mask {
    __mmask16 all;
};

OCTAVO_INLINE Vec broadcast(float value) { return {_mm512_set1_ps(value)}; }
OCTAVO_INLINE Vec load(const float* from) { return {_mm512_loadu_ps(from)}; }
OCTAVO_INLINE void store(float* to, Vec v) { _mm512_storeu_ps(to, v.all); }

OCTAVO_INLINE Vec load_bf16(const uint16_t* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
// By integers: VCVTNEPS2BF16 would flush small numbers to zero and disagree with the other paths.
OCTAVO_INLINE void store_bf16(uint16_t* to, Vec v) {
    const __m512i bits = _mm512_castps_si512(v.all);
    const __m512i top = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __m512i quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v.all, v.all, _CMP_UNORD_Q);
    const __m512i result = _mm512_mask_blend_epi32(is_nan, rounded, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(result));
}

// 16 pairs of bf16 side by side, as a panel holds two columns: first and second of each pair.
OCTAVO_INLINE Vec load_first(const void* from) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(from), 16))};
}
OCTAVO_INLINE Vec load_second(const void* from) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from), upper))};
}

// Byte `index` of 16 words of 4 bytes: an integer, times 2^24.
OCTAVO_INLINE Vec load_int8(const void* from, int index) {
    const __m512i words = _mm512_loadu_si512(from);
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xff000000U));
    switch (index) {
        case 0:
            return {_mm512_cvtepi32_ps(_mm512_slli_epi32(words, 24))};
        case 1:
            return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_slli_epi32(words, 16), top))};
        case 2:
            return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_slli_epi32(words, 8), top))};
        default:
            return {_mm512_cvtepi32_ps(_mm512_and_si512(words, top))};
    }
}

// The same of 8-bit floats: of bytes 0 and 2, or 1 and 3, at once bf16s, then one half of those.
template <class Format>
OCTAVO_INLINE Vec load_fp8(const void* from, int index) {
    const __m512i words = _mm512_loadu_si512(from);
    const __m512i tops = index % 2 == 0 ? _mm512_slli_epi16(words, 8) : words;
    const __m512i moved = _mm512_srai_epi16(tops, Format::kShift);
    const __m512i pairs =
        _mm512_and_si512(moved, _mm512_set1_epi16(static_cast<int16_t>(Format::kMask)));
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
    const __m512i bits = index < 2 ? _mm512_slli_epi32(pairs, 16) : _mm512_and_si512(pairs, upper);
    return {_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(Format::kFactor))};
}

OCTAVO_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.all, b.all)}; }
OCTAVO_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.all, b.all)}; }
OCTAVO_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.all, b.all)}; }
OCTAVO_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.all, b.all)}; }
// a * b + c, rounded once
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
// b where a lane is NaN
OCTAVO_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.all, b.all)}; }
OCTAVO_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.all, b.all)}; }
OCTAVO_INLINE Vec abs(Vec a) { return {_mm512_abs_ps(a.all)}; }

OCTAVO_INLINE Mask less(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.all, b.all, _CMP_LT_OQ)}; }
// Lanes begin <= i < end.
OCTAVO_INLINE Mask lanes_between(int64_t begin, int64_t end) {
    const __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 from =
        _mm512_cmpge_epi32_mask(index, _mm512_set1_epi32(static_cast<int>(begin)));
    const __mmask16 to = _mm512_cmplt_epi32_mask(index, _mm512_set1_epi32(static_cast<int>(end)));
    return {static_cast<__mmask16>(from & to)};
}
OCTAVO_INLINE Vec select(Mask mask, Vec yes, Vec no) {
    return {_mm512_mask_blend_ps(mask.all, no.all, yes.all)};
}

// value * 2^n, where `biased` is n + 1.5 * 2^23, so that its low bits hold n. n is -126 … 127.
OCTAVO_INLINE Vec scale_by_power(Vec value, Vec biased) {
    const __m512i offset = _mm512_set1_epi32(0x4b400000 - 127);
    const __m512i exponent = _mm512_sub_epi32(_mm512_castps_si512(biased.all), offset);
    const __m512 power = _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
    return {_mm512_mul_ps(value.all, power)};
}

// Sum of the lanes, halves onto each other: i and i + 8, i and i + 4, …
OCTAVO_INLINE float reduce_add(Vec v) {
    const __m256 eight =
        _mm256_add_ps(_mm512_castps512_ps256(v.all), _mm512_extractf32x8_ps(v.all, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
OCTAVO_INLINE float reduce_max(Vec v) {
    const __m256 eight =
        _mm256_max_ps(_mm512_castps512_ps256(v.all), _mm512_extractf32x8_ps(v.all, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
OCTAVO_INLINE float first_lane(Vec v) { return _mm512_cvtss_f32(v.all); }

#ifdef __AVX512BF16__
// acc + the products of 16 pairs of bf16 with one broadcast pair, in the processor's fixed order.
OCTAVO_INLINE Vec dot_pairs(Vec acc, uint32_t pair, Vec pairs) {
    const __m512i x = _mm512_set1_epi32(static_cast<int>(pair));
    return {_mm512_dpbf16_ps(acc.all, (__m512bh)x, (__m512bh)pairs.all)};
}
OCTAVO_INLINE Vec only_bits(Vec v, uint32_t bits) {
    return {_mm512_and_ps(v.all, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(bits))))};
}
#endif

OCTAVO_INLINE void in_turn(Vec&, int64_t&) {}  // registers suffice
OCTAVO_INLINE void prefetch(const void* address) {
    _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T0);
}

}  // namespace octavo::cpu::OCTAVO_ISA
