#include "cpu/norm.h"

#include <cmath>

namespace octavo::cpu::OCTAVO_ISA {
namespace {

void add_in_place(float* x, const float* y, float scale, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const Vec scaled = broadcast(scale) * load_some(y + i, count - i);
        store_some(x + i, load_some(x + i, count - i) + scaled, count - i);
    }
}

template <class T>
void write_normed(T* dst, const float* x, const float* weight, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const Vec normed = load_some(x + i, count - i) * broadcast(factor);
        store_some(dst + i, normed * load_some(weight + i, count - i), count - i);
    }
}

template <class T>
void write_layer_normed(T* dst, const float* x, const NormArgs& args, Moments m, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t n = count - i;
        const Vec normed = (load_some(x + i, n) - broadcast(m.mean)) * broadcast(m.factor);
        const Vec bias = args.bias == nullptr ? broadcast(0.0F) : load_some(args.bias + i, n);
        store_some(dst + i, fma(normed, load_some(args.weight + i, n), bias), n);
    }
}

}  // namespace

// Two passes: the squares are those of the distances, so that no digits cancel out.
Moments moments(const float* x, int64_t count, float eps) {
    Vec sums = broadcast(0.0F);
    for (int64_t i = 0; i < count; i += kLanes) {
        sums = sums + load_some(x + i, count - i);
    }
    const float mean = reduce_add(sums) / static_cast<float>(count);
    Vec squares = broadcast(0.0F);
    for (int64_t i = 0; i < count; i += kLanes) {
        Vec distance = load_some(x + i, count - i) - broadcast(mean);
        if (count - i < kLanes) {
            distance = select(lanes_between(0, count - i), distance, broadcast(0.0F));
        }
        squares = fma(distance, distance, squares);
    }
    const float variance = reduce_add(squares) / static_cast<float>(count);
    return {mean, 1.0F / std::sqrt(variance + eps)};
}

float inverse_rms(const float* x, int64_t count, float eps) {
    Vec squares = broadcast(0.0F);
    for (int64_t i = 0; i < count; i += kLanes) {
        const Vec v = load_some(x + i, count - i);
        squares = fma(v, v, squares);
    }
    const float mean = reduce_add(squares) / static_cast<float>(count);
    return 1.0F / std::sqrt(mean + eps);
}

void rms_norm(const NormArgs& args, int64_t begin, int64_t end) {
    const int64_t cols = args.src.cols;
    for (int64_t r = begin; r < end; ++r) {
        auto* x = reinterpret_cast<float*>(args.src.row(r));
        if (args.add != nullptr) {
            add_in_place(x, args.add + r * cols, args.add_scale, cols);
        }
        const float factor = inverse_rms(x, cols, args.eps);
        std::byte* to = args.dst.row(r);
        if (args.dst.dtype == Dtype::F32) {
            write_normed(reinterpret_cast<float*>(to), x, args.weight, factor, cols);
        } else {
            write_normed(reinterpret_cast<uint16_t*>(to), x, args.weight, factor, cols);
        }
    }
}

void layer_norm(const NormArgs& args, int64_t begin, int64_t end) {
    const int64_t cols = args.src.cols;
    for (int64_t r = begin; r < end; ++r) {
        auto* x = reinterpret_cast<float*>(args.src.row(r));
        if (args.add != nullptr) {
            add_in_place(x, args.add + r * cols, args.add_scale, cols);
        }
        const Moments m = moments(x, cols, args.eps);
        std::byte* to = args.dst.row(r);
        if (args.dst.dtype == Dtype::F32) {
            write_layer_normed(reinterpret_cast<float*>(to), x, args, m, cols);
        } else {
            write_layer_normed(reinterpret_cast<uint16_t*>(to), x, args, m, cols);
        }
    }
}

}  // namespace octavo::cpu::OCTAVO_ISA
