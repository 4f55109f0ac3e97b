// Vec as two 256-bit registers: AVX2 with FMA.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace octavo::cpu::OCTAVO_ISA {

constexpr int64_t kLanes = 16;
constexpr int kTileRows = 6;      // of the dot kernel: rows at a time,
constexpr int kAccumulators = 6;  // and rows times panels: 12 of the 16 registers

struct Vec {
    __m256 low, high;
};

struct Mask {
    __m256 low, high;
};

OCTAVO_INLINE Vec broadcast(float value) {
    const __m256 v = _mm256_set1_ps(value);
    return {v, v};
}
OCTAVO_INLINE Vec load(const float* from) {
    return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
OCTAVO_INLINE void store(float* to, Vec v) {
    _mm256_storeu_ps(to, v.low);
    _mm256_storeu_ps(to + 8, v.high);
}

OCTAVO_INLINE __m256 widen(const uint16_t* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
OCTAVO_INLINE Vec load_bf16(const uint16_t* from) { return {widen(from), widen(from + 8)}; }

OCTAVO_INLINE __m256i round_to_bf16(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i top = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, quiet, is_nan);
}
OCTAVO_INLINE void store_bf16(uint16_t* to, Vec v) {
    const __m256i packed = _mm256_packus_epi32(round_to_bf16(v.low), round_to_bf16(v.high));
    const __m256i ordered = _mm256_permute4x64_epi64(packed, 0xd8);  // packus works within halves
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), ordered);
}

// 16 pairs of bf16 side by side, as a panel holds two columns: first and second of each pair.
OCTAVO_INLINE Vec load_first(const void* from) {
    const auto* bits = static_cast<const __m256i*>(from);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(bits), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(bits + 1), 16))};
}
OCTAVO_INLINE Vec load_second(const void* from) {
    const auto* bits = static_cast<const __m256i*>(from);
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
    return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(bits), upper)),
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(bits + 1), upper))};
}

// Byte `index` of 8 words of 4 bytes, with zeros below: an integer, times 2^24.
OCTAVO_INLINE __m256 widen_int8(__m256i words, int index) {
    const __m256i top = _mm256_set1_epi32(static_cast<int>(0xff000000U));
    switch (index) {
        case 0:
            return _mm256_cvtepi32_ps(_mm256_slli_epi32(words, 24));
        case 1:
            return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_slli_epi32(words, 16), top));
        case 2:
            return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_slli_epi32(words, 8), top));
        default:
            return _mm256_cvtepi32_ps(_mm256_and_si256(words, top));
    }
}
OCTAVO_INLINE Vec load_int8(const void* from, int index) {
    const auto* words = static_cast<const __m256i*>(from);
    return {widen_int8(_mm256_loadu_si256(words), index),
            widen_int8(_mm256_loadu_si256(words + 1), index)};
}

// The same of 8-bit floats: of bytes 0 and 2, or 1 and 3, at once bf16s, then one half of those.
template <class Format>
OCTAVO_INLINE __m256 widen_fp8(__m256i words, int index) {
    const __m256i tops = index % 2 == 0 ? _mm256_slli_epi16(words, 8) : words;
    const __m256i moved = _mm256_srai_epi16(tops, Format::kShift);
    const __m256i pairs =
        _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(Format::kMask)));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
    const __m256i bits = index < 2 ? _mm256_slli_epi32(pairs, 16) : _mm256_and_si256(pairs, upper);
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(Format::kFactor));
}
template <class Format>
OCTAVO_INLINE Vec load_fp8(const void* from, int index) {
    const auto* words = static_cast<const __m256i*>(from);
    return {widen_fp8<Format>(_mm256_loadu_si256(words), index),
            widen_fp8<Format>(_mm256_loadu_si256(words + 1), index)};
}

OCTAVO_INLINE Vec operator+(Vec a, Vec b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
OCTAVO_INLINE Vec operator-(Vec a, Vec b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
OCTAVO_INLINE Vec operator*(Vec a, Vec b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
OCTAVO_INLINE Vec operator/(Vec a, Vec b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
// a * b + c, rounded once
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// b where a lane is NaN
OCTAVO_INLINE Vec min(Vec a, Vec b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
OCTAVO_INLINE Vec max(Vec a, Vec b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
OCTAVO_INLINE Vec abs(Vec a) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}

OCTAVO_INLINE Mask less(Vec a, Vec b) {
    return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
}
OCTAVO_INLINE __m256 indices_between(__m256i index, int64_t begin, int64_t end) {
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(begin)), index);
    const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(end)), index);
    return _mm256_castsi256_ps(_mm256_andnot_si256(below, inside));
}
// Lanes begin <= i < end.
OCTAVO_INLINE Mask lanes_between(int64_t begin, int64_t end) {
    return {indices_between(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), begin, end),
            indices_between(_mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15), begin, end)};
}
OCTAVO_INLINE Vec select(Mask mask, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.low, yes.low, mask.low),
            _mm256_blendv_ps(no.high, yes.high, mask.high)};
}

OCTAVO_INLINE __m256 power_of_two(__m256 biased) {
    const __m256i offset = _mm256_set1_epi32(0x4b400000 - 127);
    const __m256i exponent = _mm256_sub_epi32(_mm256_castps_si256(biased), offset);
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
// value * 2^n, where `biased` is n + 1.5 * 2^23, so that its low bits hold n. n is -126 … 127.
OCTAVO_INLINE Vec scale_by_power(Vec value, Vec biased) {
    return {_mm256_mul_ps(value.low, power_of_two(biased.low)),
            _mm256_mul_ps(value.high, power_of_two(biased.high))};
}

// Sum of the lanes, halves onto each other: i and i + 8, i and i + 4, …
OCTAVO_INLINE float reduce_add(Vec v) {
    const __m256 eight = _mm256_add_ps(v.low, v.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
OCTAVO_INLINE float reduce_max(Vec v) {
    const __m256 eight = _mm256_max_ps(v.low, v.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
OCTAVO_INLINE float first_lane(Vec v) { return _mm256_cvtss_f32(v.low); }

// One sum, then the next, and what is read at `index` for it: else the compiler keeps numbers that
// all rows use, and twelve sums fill the registers but for four; a sum without one costs a third.
OCTAVO_INLINE void in_turn(Vec& sum, int64_t& index) {
    __asm__ volatile("" : "+x"(sum.low), "+x"(sum.high), "+r"(index));
}
OCTAVO_INLINE void prefetch(const void* address) {
    _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T0);
}

}  // namespace octavo::cpu::OCTAVO_ISA
