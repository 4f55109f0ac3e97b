// Rows in the form that the dot kernels take x in: floats, or pairs of bf16.
#pragma once

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// Rows as floats, padded to whole pairs of columns.
struct FloatRows {
    static constexpr int64_t kBytesPerPair = 8;

    static const void* prepare(const Matrix& src, int64_t row, std::byte* scratch) {
        if (src.dtype == Dtype::F32 && src.cols % 2 == 0) {
            return src.row(row);
        }
        auto* to = reinterpret_cast<float*>(scratch);
        if (src.dtype == Dtype::F32) {
            copy(reinterpret_cast<const float*>(src.row(row)), to, src.cols);
        } else {
            copy(reinterpret_cast<const uint16_t*>(src.row(row)), to, src.cols);
        }
        if (src.cols % 2 != 0) {
            to[src.cols] = 0.0F;
        }
        return scratch;
    }

    template <class T>
    static void copy(const T* from, float* to, int64_t count) {
        for (int64_t i = 0; i < count; i += kLanes) {
            store_some(to + i, load_some(from + i, count - i), count - i);
        }
    }
};

#ifdef __AVX512BF16__
// Rows as pairs of bf16.
struct PairRows {
    static constexpr int64_t kBytesPerPair = 4;

    static const void* prepare(const Matrix& src, int64_t row, std::byte* scratch) {
        if (src.cols % 2 == 0) {
            return src.row(row);
        }
        const auto* from = reinterpret_cast<const uint16_t*>(src.row(row));
        auto* to = reinterpret_cast<uint16_t*>(scratch);
        std::copy(from, from + src.cols, to);
        to[src.cols] = 0;
        return scratch;
    }
};
#endif

}  // namespace
}  // namespace octavo::cpu::OCTAVO_ISA
