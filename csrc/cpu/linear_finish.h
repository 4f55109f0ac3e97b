// What happens to a linear layer's dot products: bias, then the layer's mode.
#pragma once

#include "cpu/kernels.h"
#include "cpu/math.h"
#include "cpu/simd.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// Where a panel's sums of some rows lie, `stride` floats from one row to the next.
struct Sums16 {
    const float* data;
    int64_t stride;

    OCTAVO_INLINE Vec row(int64_t index) const { return load(data + index * stride); }
};

// Writes what value(r, place) says, for rows from `first_row` on.
template <class T, class Value>
OCTAVO_INLINE void store_rows(const LinearArgs& args, int64_t first_row, int64_t num_rows,
                              int64_t column, Value value) {
    const int64_t count = args.dst.cols - column;
    for (int64_t r = 0; r < num_rows; ++r) {
        T* const to = reinterpret_cast<T*>(args.dst.row(first_row + r)) + column;
        store_some(to, value(r, to), count);
    }
}
template <class Value>
OCTAVO_INLINE void store_rows_as_wanted(const LinearArgs& args, int64_t first_row, int64_t num_rows,
                                        int64_t column, Value value) {
    args.dst.dtype == Dtype::F32 ? store_rows<float>(args, first_row, num_rows, column, value)
                                 : store_rows<uint16_t>(args, first_row, num_rows, column, value);
}

// Writes some rows of one unit from their dot products: one panel's, or for Glu two.
void finish(const LinearArgs& args, int64_t first_row, int64_t num_rows, int64_t unit, Sums16 sums,
            Sums16 right = {}) {
    const int64_t column = unit * kPanelRows;
    const int64_t place = args.first_column + column;
    const Vec none = broadcast(0.0F);
    const Vec bias = args.bias == nullptr ? none : load(args.bias + column);
    const auto value = [&](int64_t r) {
        return args.bias == nullptr ? sums.row(r) : sums.row(r) + bias;
    };
    if (args.mode == LinearMode::Glu) {
        const int64_t half = args.units() * kPanelRows;
        const Vec right_bias = args.bias == nullptr ? none : load(args.bias + half + column);
        store_rows_as_wanted(args, first_row, num_rows, place, [&](int64_t r, const void*) {
            const Vec other = args.bias == nullptr ? right.row(r) : right.row(r) + right_bias;
            return gated(args.activation, value(r), other);
        });
    } else if (args.activation != Activation::None) {
        store_rows_as_wanted(args, first_row, num_rows, place, [&](int64_t r, const void*) {
            return activate(args.activation, value(r));
        });
    } else if (args.mode == LinearMode::Add) {
        const Vec scale = broadcast(args.scale);
        const int64_t count = args.dst.cols - place;
        store_rows<float>(args, first_row, num_rows, place, [&](int64_t r, const float* to) {
            return load_some(to, count) + scale * value(r);
        });
    } else {
        store_rows<float>(args, first_row, num_rows, place,
                          [&](int64_t r, const float*) { return value(r); });
    }
}

}  // namespace
}  // namespace octavo::cpu::OCTAVO_ISA
