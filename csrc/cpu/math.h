// exp, tanh and the activations on Vec: the same polynomials on every instruction set.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace octavo::cpu::OCTAVO_ISA {

// Two at a time: in a long chain of operations, one has the processor while the other waits.
struct Two {
    Vec first, second;
};

OCTAVO_INLINE Two operator+(Two a, Vec b) { return {a.first + b, a.second + b}; }
OCTAVO_INLINE Two operator-(Two a, Vec b) { return {a.first - b, a.second - b}; }
OCTAVO_INLINE Two operator*(Two a, Two b) { return {a.first * b.first, a.second * b.second}; }
OCTAVO_INLINE Two min(Vec a, Two b) { return {min(a, b.first), min(a, b.second)}; }
OCTAVO_INLINE Two max(Vec a, Two b) { return {max(a, b.first), max(a, b.second)}; }
OCTAVO_INLINE Two fma(Two a, Vec b, Vec c) { return {fma(a.first, b, c), fma(a.second, b, c)}; }
OCTAVO_INLINE Two fma(Vec a, Two b, Vec c) { return {fma(a, b.first, c), fma(a, b.second, c)}; }
OCTAVO_INLINE Two fma(Two a, Vec b, Two c) {
    return {fma(a.first, b, c.first), fma(a.second, b, c.second)};
}
OCTAVO_INLINE Two fma(Two a, Two b, Vec c) {
    return {fma(a.first, b.first, c), fma(a.second, b.second, c)};
}
OCTAVO_INLINE Two fma(Two a, Two b, Two c) {
    return {fma(a.first, b.first, c.first), fma(a.second, b.second, c.second)};
}
OCTAVO_INLINE Two scale_by_power(Two value, Two biased) {
    return {scale_by_power(value.first, biased.first), scale_by_power(value.second, biased.second)};
}

// e^x by Cody and Waite: x = n ln 2 + r, a polynomial in r, times 2^n. Within 2 units of the last
// place on [-87.3, 88.3]; clamped outside; NaN stays NaN.
template <class V>
OCTAVO_INLINE V exp(V x) {
    x = min(broadcast(88.3F), x);  // in this order of arguments a NaN in x survives
    x = max(broadcast(-87.3F), x);
    const Vec magic = broadcast(12582912.0F);  // 1.5 * 2^23: adding it rounds to a whole number
    const V biased = fma(x, broadcast(1.44269504088896341F), magic);
    const V n = biased - magic;
    V r = fma(n, broadcast(-0.693359375F), x);
    r = fma(n, broadcast(2.12194440e-4F), r);
    V p = fma(broadcast(1.9875691500e-4F), r, broadcast(1.3981999507e-3F));
    p = fma(p, r, broadcast(8.3334519073e-3F));
    p = fma(p, r, broadcast(4.1665795894e-2F));
    p = fma(p, r, broadcast(1.6666665459e-1F));
    p = fma(p, r, broadcast(5.0000001201e-1F));
    return scale_by_power(fma(p, r * r, r) + broadcast(1.0F), biased);
}

OCTAVO_INLINE Vec tanh(Vec x) {
    // Near zero 1 - 2 / (e^2x + 1) loses digits: an odd polynomial there.
    const Vec z = x * x;
    Vec p = broadcast(-5.70498872745e-3F);
    p = fma(p, z, broadcast(2.06390887954e-2F));
    p = fma(p, z, broadcast(-5.37397155531e-2F));
    p = fma(p, z, broadcast(1.33314422036e-1F));
    p = fma(p, z, broadcast(-3.33332819422e-1F));
    const Vec near = fma(p * z, x, x);
    const Vec one = broadcast(1.0F);
    const Vec far = one - broadcast(2.0F) / (exp(x + x) + one);
    return select(less(abs(x), broadcast(0.625F)), near, far);
}

OCTAVO_INLINE Vec silu(Vec x) {
    const Vec one = broadcast(1.0F);
    return x / (one + exp(broadcast(0.0F) - x));
}

OCTAVO_INLINE Vec sigmoid(Vec x) {
    const Vec one = broadcast(1.0F);
    return one / (one + exp(broadcast(0.0F) - x));
}

// x * Φ(x), with erfc by Abramowitz and Stegun 7.1.26 (error below 2e-7); the tail keeps its sign.
OCTAVO_INLINE Vec gelu(Vec x) {
    const Vec zero = broadcast(0.0F);
    const Vec one = broadcast(1.0F);
    const Vec u = abs(x) * broadcast(0.70710678118654752F);
    const Vec t = one / fma(u, broadcast(0.3275911F), one);
    Vec p = broadcast(1.061405429F);
    p = fma(p, t, broadcast(-1.453152027F));
    p = fma(p, t, broadcast(1.421413741F));
    p = fma(p, t, broadcast(-0.284496736F));
    p = fma(p, t, broadcast(0.254829592F));
    const Vec erfc = p * t * exp(zero - u * u);
    const Vec twice_phi = select(less(x, zero), erfc, broadcast(2.0F) - erfc);
    return broadcast(0.5F) * x * twice_phi;
}

OCTAVO_INLINE Vec gelu_tanh(Vec x) {
    const Vec inner = fma(x * x * x, broadcast(0.044715F), x) * broadcast(0.79788456080286536F);
    return broadcast(0.5F) * x * (broadcast(1.0F) + tanh(inner));
}

OCTAVO_INLINE Vec relu(Vec x) { return max(broadcast(0.0F), x); }

OCTAVO_INLINE Vec relu2(Vec x) {
    const Vec kept = relu(x);
    return kept * kept;
}

OCTAVO_INLINE Vec activate(Activation activation, Vec x) {
    switch (activation) {
        case Activation::Silu:
            return silu(x);
        case Activation::Gelu:
            return gelu(x);
        case Activation::GeluTanh:
            return gelu_tanh(x);
        case Activation::Relu:
            return relu(x);
        case Activation::Relu2:
            return relu2(x);
        case Activation::Tanh:
            return tanh(x);
        case Activation::Sigmoid:
            return sigmoid(x);
        case Activation::None:
            break;
    }
    return x;
}

}  // namespace octavo::cpu::OCTAVO_ISA
