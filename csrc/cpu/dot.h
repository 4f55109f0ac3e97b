// The dot kernel: some rows of x times some panels of weights. Linear layers and attention are both
// made of it.
//
// Every output element is one chain of fused multiply-adds over ascending k, whatever the tile's
// shape: so a row's result does not depend on other rows, and all instruction sets agree.
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

// Panels come in segments, P at a time: segment s is panels[s * P …]. Sums go to rows of `out` that
// lie out_stride apart:
//   Own     each segment has its own sum:  out[r][(s * P + p) * 16 + lane] = x[r] · panel
//   Joined  x goes on from one segment to the next, and the sum from what out holds:
//           out[r][p * 16 + lane] += x[r] · panels
// `fetched` are as many places as there are panels: while a panel is read, `fetch_step` bytes a
// step from its place on are brought into the cache. A panel's own place costs next to nothing.
enum class Sums : uint8_t { Own, Joined };

using Dot = void (*)(const void* const* x, const std::byte* const* panels,
                     const std::byte* const* fetched, int64_t fetch_step, int64_t num_segments,
                     int64_t steps, float* out, int64_t out_stride);

// A step takes a few columns, those that share words of 4 bytes (of float32 two): the first for all
// rows, then the second, panel by panel, so that besides the sums only one panel's 16 weights are
// held in registers.
struct F32Weights {
    using X = float;
    static constexpr int64_t kStepBytes = 2 * kLanes * 4;
    static constexpr int64_t kColumns = 2;  // per step
    static constexpr int64_t kXs = 2;       // numbers of x that a step takes
    static OCTAVO_INLINE Vec column(const std::byte* pair, int index) {
        return load(reinterpret_cast<const float*>(pair) + index * kLanes);
    }
    static OCTAVO_INLINE Vec add(Vec acc, X x, Vec w) { return fma(broadcast(x), w, acc); }
};

struct Bf16Weights {
    using X = float;
    static constexpr int64_t kStepBytes = 2 * kLanes * 2;
    static constexpr int64_t kColumns = 2;
    static constexpr int64_t kXs = 2;
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
    static constexpr int64_t kXs = 4;
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
    static constexpr int64_t kXs = 4;
    static constexpr float kUnit = 1.0F;
    static OCTAVO_INLINE Vec column(const std::byte* words, int index) {
        return load_fp8<Format>(words, index);
    }
    static OCTAVO_INLINE Vec add(Vec acc, X x, Vec w) { return fma(broadcast(x), w, acc); }
};

#ifdef __AVX512BF16__
// x is bf16 too: the processor multiplies and adds pairs, in an order of its own but always the
// same.
struct Bf16Pairs {
    using X = uint32_t;
    static constexpr int64_t kStepBytes = 2 * kLanes * 2;
    static constexpr int64_t kColumns = 2;
    static constexpr int64_t kXs = 1;  // the pair at once
    static OCTAVO_INLINE Vec column(const std::byte* pair, int) {
        return load(reinterpret_cast<const float*>(pair));  // bits as they are
    }
    static OCTAVO_INLINE Vec column_bits(const std::byte* pair, uint32_t wanted) {
        return only_bits(column(pair, 0), wanted);
    }
    static OCTAVO_INLINE Vec add(Vec acc, X x, Vec w) { return dot_pairs(acc, x, w); }
};
#endif

constexpr int64_t kLineBytes = 64;  // of the cache

// Sums of R rows and P panels, in registers.
template <class Weights, int R, int P>
class DotTile {
    using X = typename Weights::X;

  public:
    OCTAVO_INLINE explicit DotTile(const void* const* x) {
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            row_[r] = static_cast<const X*>(x[r]);
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                sums_[r][p] = broadcast(0.0F);
            }
        }
    }

    OCTAVO_INLINE void load_sums(const float* from, int64_t stride) {
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                sums_[r][p] = load(from + r * stride + p * kLanes);
            }
        }
    }
    OCTAVO_INLINE void store_sums(float* to, int64_t stride) const {
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                store(to + r * stride + p * kLanes, sums_[r][p]);
            }
        }
    }

    OCTAVO_INLINE void add(const std::byte* const* panels, const std::byte* const* fetched,
                           int64_t fetch_step, int64_t steps) {
        const std::byte* w[P];
        const std::byte* ahead[P];
        OCTAVO_UNROLL
        for (int p = 0; p < P; ++p) {
            w[p] = panels[p];
            ahead[p] = fetched[p];
        }
        for (int64_t j = 0; j < steps; ++j) {
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                OCTAVO_UNROLL
                for (int64_t line = 0; line < Weights::kStepBytes; line += kLineBytes) {
                    prefetch(ahead[p] + line);
                }
            }
            OCTAVO_UNROLL
            for (int column = 0; column < Weights::kXs; ++column) {
                int64_t at = column;
                OCTAVO_UNROLL
                for (int p = 0; p < P; ++p) {
                    const Vec weights = Weights::column(w[p], column);
                    OCTAVO_UNROLL
                    for (int r = 0; r < R; ++r) {
                        sums_[r][p] = Weights::add(sums_[r][p], row_[r][at], weights);
                        if constexpr (P > 1 && R * P == kAccumulators) {
                            in_turn(sums_[r][p], at);
                        }
                    }
                }
            }
            OCTAVO_UNROLL
            for (int r = 0; r < R; ++r) {
                row_[r] += Weights::kXs;
            }
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                w[p] += Weights::kStepBytes;
                ahead[p] += fetch_step;
            }
        }
    }

  private:
    const X* row_[R];
    Vec sums_[R][P];
};

template <class Weights, Sums kSums, int R, int P>
void dot(const void* const* x, const std::byte* const* panels, const std::byte* const* fetched,
         int64_t fetch_step, int64_t num_segments, int64_t steps, float* out, int64_t out_stride) {
    if constexpr (kSums == Sums::Own) {
        for (int64_t s = 0; s < num_segments; ++s) {
            DotTile<Weights, R, P> tile(x);
            tile.add(panels + s * P, fetched + s * P, fetch_step, steps);
            tile.store_sums(out + s * P * kLanes, out_stride);
        }
    } else {
        DotTile<Weights, R, P> tile(x);
        tile.load_sums(out, out_stride);
        for (int64_t s = 0; s < num_segments; ++s) {
            tile.add(panels + s * P, fetched + s * P, fetch_step, steps);
        }
        tile.store_sums(out, out_stride);
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

template <class Weights, Sums kSums>
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
        table_[R][log2_of(P)] = dot<Weights, kSums, R, P>;
        if constexpr (P * 2 <= max_panels(R)) {
            fill<R, P * 2>();
        }
    }

    std::array<std::array<Dot, 4>, kTileRows + 1> table_{};
};

}  // namespace
}  // namespace octavo::cpu::OCTAVO_ISA
