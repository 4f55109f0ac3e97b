// Vec: 16 float32 lanes on every instruction set, the only place with intrinsics.
//
// A lane is always computed by the same IEEE operations in the same order, so all instruction sets
// agree to the last bit. Multiply-add is fused where it is written fma() and nowhere else
// (-ffp-contract=off).
#pragma once

#include "common/dtype.h"

#ifndef OCTAVO_ISA
#error "OCTAVO_ISA names the instruction set that this source is compiled for"
#endif

#if defined(OCTAVO_NEON)  // not __ARM_NEON: the generic set must stay without it
#include "cpu/simd_neon.h"
#elif defined(__AVX512F__)
#include "cpu/simd_avx512.h"
#elif defined(__AVX2__)
#include "cpu/simd_avx2.h"
#else
#include "cpu/simd_generic.h"
#endif

namespace octavo::cpu::OCTAVO_ISA {

OCTAVO_INLINE Vec load_bf16_n(const uint16_t* from, int64_t count) {
    uint16_t lanes[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) {
        lanes[i] = from[i];
    }
    return load_bf16(lanes);
}

OCTAVO_INLINE void store_bf16_n(uint16_t* to, Vec value, int64_t count) {
    uint16_t lanes[kLanes];
    store_bf16(lanes, value);
    for (int64_t i = 0; i < count; ++i) {
        to[i] = lanes[i];
    }
}

OCTAVO_INLINE Vec load_n(const float* from, int64_t count) {
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) {
        lanes[i] = from[i];
    }
    return load(lanes);
}

OCTAVO_INLINE void store_n(float* to, Vec value, int64_t count) {
    float lanes[kLanes];
    store(lanes, value);
    for (int64_t i = 0; i < count; ++i) {
        to[i] = lanes[i];
    }
}

// One spelling for both dtypes; `count` below 16 leaves the other lanes zero, and unread in memory.
OCTAVO_INLINE Vec load_some(const float* from, int64_t count) {
    return count >= kLanes ? load(from) : load_n(from, count);
}
OCTAVO_INLINE Vec load_some(const uint16_t* from, int64_t count) {
    return count >= kLanes ? load_bf16(from) : load_bf16_n(from, count);
}
OCTAVO_INLINE void store_some(float* to, Vec value, int64_t count) {
    count >= kLanes ? store(to, value) : store_n(to, value, count);
}
OCTAVO_INLINE void store_some(uint16_t* to, Vec value, int64_t count) {
    count >= kLanes ? store_bf16(to, value) : store_bf16_n(to, value, count);
}

}  // namespace octavo::cpu::OCTAVO_ISA
