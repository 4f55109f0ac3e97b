// AVX-512 over SIMDe, for processors without it: included before all else where its kernel sets are
// compiled for tests (OCTAVO_EMULATE), so that the kernels' own sources run unchanged.
//
// What SIMDe has not, or not with the processor's rounding, is written below. An intrinsic missing
// from both is an error of the compiler's: "target specific option mismatch".
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cstdint>

#include "emulated/rounding.h"

// What the compiler would say of itself.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#ifdef OCTAVO_EMULATE_AVX512BF16
#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1
#endif

namespace octavo::emulated {

using Floats = float __attribute__((vector_size(64)));
using Words = int32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));
using Bytes = uint8_t __attribute__((vector_size(16)));
using SignedBytes = int8_t __attribute__((vector_size(16)));

inline __mmask16 less(__m512i a, __m512i b) {
    const Words below = (Words)a < (Words)b;
    uint32_t mask = 0;
    for (int i = 0; i < 16; ++i) {
        mask |= (below[i] & 1U) << i;
    }
    return static_cast<__mmask16>(mask);
}
inline __m256i narrow(__m512i v) { return (__m256i) __builtin_convertvector((Words)v, Halves); }
inline __m512i widen(__m256i v) { return (__m512i) __builtin_convertvector((Halves)v, Words); }
inline __m512i widen_bytes(__m128i v) { return (__m512i) __builtin_convertvector((Bytes)v, Words); }
inline __m512i widen_signed_bytes(__m128i v) {
    return (__m512i) __builtin_convertvector((SignedBytes)v, Words);
}
inline __m512i with_zeros(__m256i v) {
    return (__m512i)__builtin_shufflevector((__v4di)v, __v4di{}, 0, 1, 2, 3, 4, 5, 6, 7);
}
inline int32_t sum_of(__m512i v) {
    uint32_t sum = 0;  // it wraps
    for (int i = 0; i < 16; ++i) {
        sum += static_cast<uint32_t>(((Words)v)[i]);
    }
    return static_cast<int32_t>(sum);
}
inline __m512 to_floats(__m512i v) { return (__m512) __builtin_convertvector((Words)v, Floats); }
inline __m512 half_to_floats(__m256i v) {
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(v));
    const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
inline __m256 half_of(__m512 v, int index) {
    return index == 0 ? __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7)
                      : __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}

// Both products of each pair of 16 bits: SIMDe's loops take GCC minutes to unroll.
inline __m512i dot_words(__m512i sum, __m512i a, __m512i b) {
    const auto x = (Words)a;
    const auto y = (Words)b;
    const Words first = ((x << 16) >> 16) * ((y << 16) >> 16);
    return (__m512i)((Words)sum + (first + (x >> 16) * (y >> 16)));
}

// Byte `index` of each word: of unsigned ones in a, times that of signed ones in b.
inline Words product_of_bytes(__m512i a, __m512i b, int index) {
    return (((Words)a >> (8 * index)) & 255) * (((Words)b << (24 - 8 * index)) >> 24);
}
inline __m512i dot_bytes(__m512i sum, __m512i a, __m512i b) {
    const Words low = product_of_bytes(a, b, 0) + product_of_bytes(a, b, 1);
    return (__m512i)((Words)sum + (low + product_of_bytes(a, b, 2) + product_of_bytes(a, b, 3)));
}
inline Words clamp_to_16_bits(Words v) {
    v = v < -32768 ? Words{} - 32768 : v;
    return v > 32767 ? Words{} + 32767 : v;
}
inline __m512i dot_pairs_of_bytes(__m512i a, __m512i b) {
    const Words low = clamp_to_16_bits(product_of_bytes(a, b, 0) + product_of_bytes(a, b, 1));
    const Words high = clamp_to_16_bits(product_of_bytes(a, b, 2) + product_of_bytes(a, b, 3));
    return (__m512i)((low & 0xffff) | (high << 16));
}

// The second of each pair first, each product added with one rounding.
inline __m512 dot_bf16(__m512 sum, __m512bh a, __m512bh b) {
    const auto x = (Words)a;
    const auto y = (Words)b;
    for (int i = 0; i < 16; ++i) {
        const auto pair_x = static_cast<uint32_t>(x[i]);
        const auto pair_y = static_cast<uint32_t>(y[i]);
        sum[i] = fma_bf16(pair_x >> 16, pair_y >> 16, sum[i]);
        sum[i] = fma_bf16(pair_x & 0xffffU, pair_y & 0xffffU, sum[i]);
    }
    return sum;
}

}  // namespace octavo::emulated

#undef _mm512_cmplt_epi32_mask  // compilers have some of them as macros
#undef _mm512_extractf32x8_ps
#define _mm512_cmplt_epi32_mask(a, b) octavo::emulated::less(a, b)
#define _mm512_cvtepi32_epi16(v) octavo::emulated::narrow(v)
#define _mm512_cvtepu16_epi32(v) octavo::emulated::widen(v)
#define _mm512_cvtepu8_epi32(v) octavo::emulated::widen_bytes(v)
#define _mm512_cvtepi8_epi32(v) octavo::emulated::widen_signed_bytes(v)
#define _mm512_zextsi256_si512(v) octavo::emulated::with_zeros(v)
#define _mm512_reduce_add_epi32(v) octavo::emulated::sum_of(v)
#define _mm512_cvtepi32_ps(v) octavo::emulated::to_floats(v)
#define _mm512_cvtph_ps(v) octavo::emulated::half_to_floats(v)
#define _mm512_cvtss_f32(v) ((v)[0])
#define _mm512_extractf32x8_ps(v, index) octavo::emulated::half_of(v, index)
#undef _mm512_madd_epi16  // SIMDe's has four arguments
#define _mm512_madd_epi16(a, b) octavo::emulated::dot_words(_mm512_setzero_si512(), a, b)
#undef _mm512_maddubs_epi16
#define _mm512_maddubs_epi16(a, b) octavo::emulated::dot_pairs_of_bytes(a, b)
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32(sum, a, b) octavo::emulated::dot_bytes(sum, a, b)
#undef _mm512_dpwssd_epi32
#define _mm512_dpwssd_epi32(sum, a, b) octavo::emulated::dot_words(sum, a, b)
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sum, a, b) octavo::emulated::dot_bf16(sum, a, b)
