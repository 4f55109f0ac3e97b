// The number types that kernels compute with, and rounding between them.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

// Kernel sources are compiled once per instruction set. A small function from a shared header must
// be inlined there: one out-of-line copy, picked by the linker, could hold instructions this
// machine lacks.
#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo {

enum class Dtype : uint8_t { F32, BF16 };

constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::F32 ? 4 : 2; }
constexpr const char* name_of(Dtype dtype) { return dtype == Dtype::F32 ? "f32" : "bf16"; }

// Throws ValueError on any other name than "f32" and "bf16".
Dtype parse_dtype(std::string_view name);

OCTAVO_INLINE float bf16_to_float(uint16_t value) {
    return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

// Round to nearest, ties to even; a NaN stays a NaN.
OCTAVO_INLINE uint16_t float_to_bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) {
        return static_cast<uint16_t>((bits >> 16) | 0x40U);
    }
    return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

}  // namespace octavo
