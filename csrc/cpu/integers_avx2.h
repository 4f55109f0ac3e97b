// Dot products of integers with AVX2.
#pragma once

namespace octavo::cpu::OCTAVO_ISA {

// Fields of words are taken by shifts that are known when compiled.
#define OCTAVO_UNROLL_PAIRS OCTAVO_UNROLL

constexpr int kIntegerRows = 6;  // rows times panels at a time: 12 of the 16 registers are sums
constexpr int kPackedRows = 6;   // of panels as they are packed
constexpr int kPackedPanels = 1;
constexpr int kFloatRegisters = 0;

struct Integers {
    __m256i low, high;
};
using Pairs = Integers;

// Sums of 16 bits, of two columns each: 16 products of the largest byte with 127 fit.
constexpr int kLargestByte = 15;
constexpr int kByteRows = 6;

struct Quads {
    __m256i low, high;
};
struct ByteSums {
    __m256i low, high;
};

OCTAVO_INLINE Vec to_floats(Integers v) {
    return {_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)};
}
OCTAVO_INLINE Vec load_half(const std::byte* from) {
    const auto* bits = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(bits)), _mm256_cvtph_ps(_mm_loadu_si128(bits + 1))};
}
OCTAVO_INLINE Integers load_words(const std::byte* from) {
    const auto* bits = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(bits), _mm256_loadu_si256(bits + 1)};
}
OCTAVO_INLINE void store_words(std::byte* to, Integers v) {
    auto* bits = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(bits, v.low);
    _mm256_storeu_si256(bits + 1, v.high);
}

template <int Bits>
OCTAVO_INLINE __m256i field_of(__m256i words, int from, int to) {
    constexpr int kMask = (1 << Bits) - 1;
    words = from >= to ? _mm256_srli_epi16(words, from - to) : _mm256_slli_epi16(words, to - from);
    if (from + Bits == 16 && to == 0) {
        return words;  // the shift has cleared the rest
    }
    return _mm256_and_si256(words, _mm256_set1_epi16(static_cast<int16_t>(kMask << to)));
}
template <int Bits>
OCTAVO_INLINE Pairs bit_fields(const std::byte* chunk, int index, int to) {
    const Integers words = load_words(chunk);
    return {field_of<Bits>(words.low, index * Bits, to),
            field_of<Bits>(words.high, index * Bits, to)};
}

OCTAVO_INLINE Pairs signed_bytes(Integers words, int index) {
    if (index == 0) {
        words = {_mm256_slli_epi16(words.low, 8), _mm256_slli_epi16(words.high, 8)};
    }
    return {_mm256_srai_epi16(words.low, 8), _mm256_srai_epi16(words.high, 8)};
}
OCTAVO_INLINE Pairs signed_bytes(const std::byte* chunk, int index) {
    return signed_bytes(load_words(chunk), index);
}

OCTAVO_INLINE Pairs looked_up(const std::byte* chunk, int index, const int8_t* table) {
    const __m256i entries =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    const __m256i mask = _mm256_set1_epi8(15);
    Integers words = load_words(chunk);
    if (index % 2 == 1) {
        words = {_mm256_srli_epi16(words.low, 4), _mm256_srli_epi16(words.high, 4)};
    }
    const Integers found{_mm256_shuffle_epi8(entries, _mm256_and_si256(words.low, mask)),
                         _mm256_shuffle_epi8(entries, _mm256_and_si256(words.high, mask))};
    return signed_bytes(found, index / 2);
}

OCTAVO_INLINE Pairs operator|(Pairs a, Pairs b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
OCTAVO_INLINE Pairs operator*(Pairs a, Pairs b) {
    return {_mm256_mullo_epi16(a.low, b.low), _mm256_mullo_epi16(a.high, b.high)};
}
OCTAVO_INLINE Pairs less_constant(Pairs a, int b) {
    const __m256i constant = _mm256_set1_epi16(static_cast<int16_t>(b));
    return {_mm256_sub_epi16(a.low, constant), _mm256_sub_epi16(a.high, constant)};
}

OCTAVO_INLINE __m256i both_halves(const std::byte* from, int mask) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    const __m256i wide =
        _mm256_cvtepi8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(static_cast<int8_t>(mask))));
    return _mm256_or_si256(_mm256_and_si256(wide, _mm256_set1_epi32(0xffff)),
                           _mm256_slli_epi32(wide, 16));
}
OCTAVO_INLINE Pairs small_scales(const std::byte* from, int mask) {
    return {both_halves(from, mask), both_halves(from + 8, mask)};
}

OCTAVO_INLINE __m256 byte_floats(const std::byte* from, int shift) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_cvtepu8_epi32(bytes), shift));
}
OCTAVO_INLINE Vec small_minima(const std::byte* from, int shift) {
    return {byte_floats(from, shift), byte_floats(from + 8, shift)};
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

template <int Bits>
OCTAVO_INLINE Quads low_bytes(const std::byte* chunk, int index) {
    static_assert(Bits == 4);
    const __m256i mask = _mm256_set1_epi8(15);
    Integers words = load_words(chunk);
    if (index == 1) {
        words = {_mm256_srli_epi16(words.low, 4), _mm256_srli_epi16(words.high, 4)};
    }
    return {_mm256_and_si256(words.low, mask), _mm256_and_si256(words.high, mask)};
}

OCTAVO_INLINE ByteSums multiply_add(ByteSums sums, Quads w, const std::byte* x) {
    const __m256i quad = _mm256_set1_epi32(load_word(x));
    sums = {_mm256_add_epi16(sums.low, _mm256_maddubs_epi16(w.low, quad)),
            _mm256_add_epi16(sums.high, _mm256_maddubs_epi16(w.high, quad))};
    asm volatile("" : "+x"(sums.low), "+x"(sums.high));  // as above
    return sums;
}
OCTAVO_INLINE Integers total(ByteSums sums, int32_t less) {
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i minus = _mm256_set1_epi32(less);
    return {_mm256_sub_epi32(_mm256_madd_epi16(sums.low, ones), minus),
            _mm256_sub_epi32(_mm256_madd_epi16(sums.high, ones), minus)};
}

OCTAVO_INLINE Vec small_factors(const std::byte* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

OCTAVO_INLINE void store_bytes(const int16_t* q, const uint8_t* order, int8_t* to) {
    const auto* from = reinterpret_cast<const __m128i*>(q);
    const __m128i bytes = _mm_packs_epi16(_mm_loadu_si128(from), _mm_loadu_si128(from + 1));
    const __m128i places = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(bytes, places));
}

OCTAVO_INLINE int32_t sum_of(__m256i v) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
OCTAVO_INLINE int32_t store_rounded(Vec biased, int16_t* to) {
    const __m256i bias = _mm256_castps_si256(_mm256_set1_ps(kRounder));
    const __m256i low = _mm256_sub_epi32(_mm256_castps_si256(biased.low), bias);
    const __m256i high = _mm256_sub_epi32(_mm256_castps_si256(biased.high), bias);
    const __m256i packed = _mm256_packs_epi32(low, high);
    const __m256i ordered = _mm256_permute4x64_epi64(packed, 0xd8);  // packs works within halves
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), ordered);
    return sum_of(_mm256_madd_epi16(packed, _mm256_set1_epi16(1)));
}

}  // namespace octavo::cpu::OCTAVO_ISA
