// The dot kernel: some rows of x times some panels of weights. Linear layers and attention are both
// made of it.
//
// Every output element is one chain of fused multiply-adds over ascending k, whatever the tile's
// shape: so a row's result does not depend on its neighbours, and all instruction sets agree.
#pragma once

#include <array>
#include <utility>

#include "cpu/fp8.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"

// Loops over a tile's rows and panels must vanish, or the sums would not stay in registers.
#ifdef __clang__
#define OCTAVO_UNROLL _Pragma("clang loop unroll(full)")
#else
#define OCTAVO_UNROLL _Pragma("GCC unroll 16")
#endif

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// out[r][p][lane] += sum over k of x[r][k] * panels[p][k][lane]; the sum continues from what out
// holds. A panel may come in segments: segment s of panel p is panels[s * NumPanels + p].
using Dot = void (*)(const void* const* x, const std::byte* const* panels, int64_t num_segments,
                     int64_t steps, float* out);

// A step takes a few columns, those that share words of 4 bytes (of float32 two): the first for all
// rows, then the second, panel by panel, so that besides the sums only one panel's 16 weights are
// held in registers.
struct F32Weights {
    using X = float;
    static constexpr int64_t kStepBytes = 2 * kLanes * 4;
    static constexpr int64_t kColumns = 2;  // per step, each with its own x
    static OCTAVO_INLINE Vec column(const std::byte* pair, int index) {
        return load(reinterpret_cast<const float*>(pair) + index * kLanes);
    }
    static OCTAVO_INLINE Vec add(Vec acc, X x, Vec w) { return fma(broadcast(x), w, acc); }
};

struct Bf16Weights {
    using X = float;
    static constexpr int64_t kStepBytes = 2 * kLanes * 2;
    static constexpr int64_t kColumns = 2;
    static OCTAVO_INLINE Vec column(const std::byte* pair, int index) {
        return index == 0 ? load_first(pair) : load_second(pair);
    }
    static OCTAVO_INLINE Vec add(Vec acc, X x, Vec w) { return fma(broadcast(x), w, acc); }
};

// What a KV cache of 8 bits holds, without its scales.
struct Int8Weights {
    using X = float;
    static constexpr int64_t kStepBytes = 4 * kLanes;
    static constexpr int64_t kColumns = 4;
    static constexpr float kUnit = 0x1.0p-24F;  // columns are so many times too large
    static OCTAVO_INLINE Vec column(const std::byte* words, int index) {
        return load_int8(words, index);
    }
    static OCTAVO_INLINE Vec add(Vec acc, X x, Vec w) { return fma(broadcast(x), w, acc); }
};

template <class Format>
struct Fp8Weights {
    using X = float;
    static constexpr int64_t kStepBytes = 4 * kLanes;
    static constexpr int64_t kColumns = 4;
    static constexpr float kUnit = 1.0F;
    static OCTAVO_INLINE Vec column(const std::byte* words, int index) {
        return load_fp8<Format>(words, index);
    }
    static OCTAVO_INLINE Vec add(Vec acc, X x, Vec w) { return fma(broadcast(x), w, acc); }
};

#ifdef __AVX512BF16__
// x is bf16 too: the processor multiplies and adds pairs, in an order of its own but always the
// same. Not run when written: see simd_avx512.h.
struct Bf16Pairs {
    using X = uint32_t;
    static constexpr int64_t kStepBytes = 2 * kLanes * 2;
    static constexpr int64_t kColumns = 1;  // the pair at once
    static OCTAVO_INLINE Vec column(const std::byte* pair, int) {
        return load(reinterpret_cast<const float*>(pair));  // bits as they are
    }
    static OCTAVO_INLINE Vec add(Vec acc, X x, Vec w) { return dot_pairs(acc, x, w); }
};
#endif

// Ahead in each panel: the hardware does not look beyond a page.
constexpr int64_t kPrefetchBytes = 1024;

template <class Weights, int R, int P>
void dot(const void* const* x, const std::byte* const* panels, int64_t num_segments, int64_t steps,
         float* out) {
    using X = typename Weights::X;
    Vec acc[R][P];
    const X* row[R];
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
        row[r] = static_cast<const X*>(x[r]);
        OCTAVO_UNROLL
        for (int p = 0; p < P; ++p) {
            acc[r][p] = load(out + (r * P + p) * kLanes);
        }
    }
    for (int64_t segment = 0; segment < num_segments; ++segment) {
        const std::byte* w[P];
        OCTAVO_UNROLL
        for (int p = 0; p < P; ++p) {
            w[p] = panels[segment * P + p];
        }
        for (int64_t j = 0; j < steps; ++j) {
            if constexpr (R <= 2) {  // with few rows, memory is the limit
                OCTAVO_UNROLL
                for (int p = 0; p < P; ++p) {
                    prefetch(w[p] + kPrefetchBytes);
                }
            }
            OCTAVO_UNROLL
            for (int column = 0; column < Weights::kColumns; ++column) {
                OCTAVO_UNROLL
                for (int p = 0; p < P; ++p) {
                    const Vec weights = Weights::column(w[p], column);
                    OCTAVO_UNROLL
                    for (int r = 0; r < R; ++r) {
                        acc[r][p] = Weights::add(acc[r][p], row[r][column], weights);
                    }
                }
            }
            OCTAVO_UNROLL
            for (int r = 0; r < R; ++r) {
                row[r] += Weights::kColumns;
            }
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                w[p] += Weights::kStepBytes;
            }
        }
    }
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
        OCTAVO_UNROLL
        for (int p = 0; p < P; ++p) {
            store(out + (r * P + p) * kLanes, acc[r][p]);
        }
    }
}

constexpr int kMaxPanels = 8;
constexpr int kTileFloats = kAccumulators * static_cast<int>(kLanes);  // of the largest tile's out

// The most panels, a power of two, that go with so many rows at a time.
constexpr int max_panels(int64_t num_rows) {
    int panels = 1;
    while (panels * 2 <= kMaxPanels && panels * 2 * num_rows <= kAccumulators) {
        panels *= 2;
    }
    return panels;
}

constexpr int log2_of(int panels) {
    return panels >= 8 ? 3 : panels >= 4 ? 2 : panels >= 2 ? 1 : 0;
}

template <class Weights>
class DotTable {
  public:
    constexpr DotTable() { fill_rows(std::make_integer_sequence<int, kTileRows>()); }

    // For 1 … kTileRows rows and a power of two of panels up to max_panels(num_rows).
    Dot get(int64_t num_rows, int num_panels) const {
        return table_[static_cast<size_t>(num_rows)][static_cast<size_t>(log2_of(num_panels))];
    }

  private:
    template <int... Row>
    constexpr void fill_rows(std::integer_sequence<int, Row...>) {
        (fill<Row + 1, 1>(), ...);
    }
    template <int R, int P>
    constexpr void fill() {
        table_[R][log2_of(P)] = dot<Weights, R, P>;
        if constexpr (P * 2 <= max_panels(R)) {
            fill<R, P * 2>();
        }
    }

    std::array<std::array<Dot, 4>, kTileRows + 1> table_{};
};

}  // namespace
}  // namespace octavo::cpu::OCTAVO_ISA
