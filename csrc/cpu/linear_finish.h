// What happens to a linear layer's dot products: bias, then the layer's mode.
#pragma once

#include "cpu/kernels.h"
#include "cpu/math.h"
#include "cpu/simd.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

template <class T>
void finish_glu(const LinearArgs& args, int64_t row, int64_t unit, Vec left, Vec right) {
    const int64_t column = args.first_column + unit * kPanelRows;
    auto* to = reinterpret_cast<T*>(args.dst.row(row)) + column;
    const int64_t count = args.dst.cols - column;
    store_some(to, gated(args.activation, left, right), count);
}

template <class T>
void store_activated(const LinearArgs& args, int64_t row, int64_t column, Vec value) {
    column += args.first_column;
    auto* to = reinterpret_cast<T*>(args.dst.row(row)) + column;
    store_some(to, activate(args.activation, value), args.dst.cols - column);
}

// Writes one row of one unit from its dot products: one panel's, or for Glu two.
void finish(const LinearArgs& args, int64_t row, int64_t unit, const float* y,
            const float* y_right) {
    const int64_t column = unit * kPanelRows;
    Vec value = load(y);
    if (args.bias != nullptr) {
        value = value + load(args.bias + column);
    }
    if (args.mode == LinearMode::Glu && y_right != nullptr) {  // the second tells compilers
        Vec right = load(y_right);
        if (args.bias != nullptr) {
            right = right + load(args.bias + args.units() * kPanelRows + column);
        }
        args.dst.dtype == Dtype::F32 ? finish_glu<float>(args, row, unit, value, right)
                                     : finish_glu<uint16_t>(args, row, unit, value, right);
        return;
    }
    if (args.activation != Activation::None) {
        args.dst.dtype == Dtype::F32 ? store_activated<float>(args, row, column, value)
                                     : store_activated<uint16_t>(args, row, column, value);
        return;
    }
    const int64_t place = args.first_column + column;
    float* to = reinterpret_cast<float*>(args.dst.row(row)) + place;
    const int64_t count = args.dst.cols - place;
    if (args.mode == LinearMode::Add) {
        const Vec scaled = broadcast(args.scale) * value;
        value = load_some(to, count) + scaled;
    }
    store_some(to, value, count);
}

}  // namespace
}  // namespace octavo::cpu::OCTAVO_ISA
