// The integer dot kernel: some rows of quantised activations times panels, group by group.
//
// Few rows meet panels as they are packed, two at a time where there are registers for it: each
// activation is then loaded once for both, and memory is read in two places. For more rows, some of
// its groups are unpacked to 16 bits once, and all rows' tiles sweep them. Codes that are
// multiplied as bytes are never unpacked: a shift and a mask for four columns are little even
// beside a single tile.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "cpu/dot.h"
#include "cpu/integers.h"
#include "cpu/quantize.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// In the panels, which follow each other in memory: nearer, and a line has not arrived when it is
// needed; then it costs more than if none were fetched.
constexpr int64_t kAheadBytes = 12288;
constexpr auto kGroupStride = static_cast<int64_t>(sizeof(ActivationGroup));

// Rows that take the packed form at a time, of some panels, and how many of them are few: three
// times unpacked is still cheaper than stored once, where a shift and a mask are all there is to
// it. A panel that goes alone where two could is the last of an odd number, or has another packing
// than its neighbour: low tiles will do.
constexpr bool is_simple(const Format& format) {
    return !format.has_small() && format.high_bits() == 0 && format.codes < Codes::Nonlinear;
}
constexpr int kLowRows = 4;
constexpr int kLoneRows = 12;  // the same of unpacked ones
constexpr int packed_rows(const Format& format, int panels) {
    const int rows = is_simple(format) ? kPackedRows : kPackedRows / 2;
    return panels == kPackedPanels ? rows : std::min(rows, kLowRows);
}
constexpr int byte_rows(int panels) {
    return panels == kPackedPanels ? kByteRows : std::min(kByteRows, kLowRows);
}
constexpr int few_rows(const Format& format) {
    return is_simple(format) ? 3 * kPackedRows : kPackedRows / 2;
}

// A group of 16 rows, unpacked.
struct alignas(64) UnpackedGroup {
    std::byte words[kGroupPairs * kChunkBytes];
    float factors[3][kLanes];  // scales, then minima
};

template <int Sums, int Minima>
class Unpacked {
  public:
    static constexpr int kSums = Sums;
    static constexpr int kMinima = Minima;
    static_assert(Sums + Minima <= 3);

    OCTAVO_INLINE explicit Unpacked(const UnpackedGroup& group) : group_(group) {}
    OCTAVO_INLINE Pairs pair(int64_t index) const {
        return load_words(group_.words + index * kChunkBytes);
    }
    OCTAVO_INLINE Vec scale(int sum) const { return load(group_.factors[sum]); }
    OCTAVO_INLINE Vec minimum(int sub) const { return load(group_.factors[Sums + sub]); }

  private:
    const UnpackedGroup& group_;
};

// Two panels make a step: their groups lie in turns, and so do the floats of a row. Either may also
// go alone.
constexpr int kIntegerPanels = 2;
constexpr int64_t kOutStride = kIntegerPanels * kLanes;

// The floats of R rows and P panels, out[r][p][lane], where they lie in memory: the registers hold
// the integers.
template <int R, int P>
class FloatsInMemory {
  public:
    OCTAVO_INLINE explicit FloatsInMemory(float* out) : out_(out) {}
    OCTAVO_INLINE Vec get(int r, int p) const { return load(out_ + r * kOutStride + p * kLanes); }
    OCTAVO_INLINE void set(int r, int p, Vec v) { store(out_ + r * kOutStride + p * kLanes, v); }
    OCTAVO_INLINE void finish() {}

  private:
    float* const out_;
};

// The same in registers, where a tile is so low that there are some left.
template <int R, int P>
class FloatsInRegisters {
  public:
    OCTAVO_INLINE explicit FloatsInRegisters(float* out) : out_(out) {
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                floats_[r][p] = load(out + r * kOutStride + p * kLanes);
            }
        }
    }
    OCTAVO_INLINE Vec get(int r, int p) const { return floats_[r][p]; }
    OCTAVO_INLINE void set(int r, int p, Vec v) { floats_[r][p] = v; }
    OCTAVO_INLINE void finish() {
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                store(out_ + r * kOutStride + p * kLanes, floats_[r][p]);
            }
        }
    }

  private:
    float* const out_;
    Vec floats_[R][P];
};

template <int R, int P>
using Floats = std::conditional_t<R * P <= kFloatRegisters, FloatsInRegisters<R, P>,  //
                                  FloatsInMemory<R, P>>;

// The floats go on by one of the sums of a group of each of P panels.
template <int kSum, int R, int P, class Group, class Out>
OCTAVO_INLINE void add_sum(const Group (&weights)[P], const std::byte* x, int64_t x_stride,
                           Out& out) {
    constexpr auto kPairs = static_cast<int>(kGroupPairs / Group::kSums);
    Integers sums[R][P] = {};
    OCTAVO_UNROLL_PAIRS
    for (int i = kSum * kPairs; i < (kSum + 1) * kPairs; ++i) {
        Pairs w[P];
        OCTAVO_UNROLL
        for (int p = 0; p < P; ++p) {
            w[p] = weights[p].pair(i);
        }
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                sums[r][p] = multiply_add(sums[r][p], w[p], x + i * 4 + r * x_stride);
            }
        }
    }
    asm volatile("" ::: "memory");  // the floats' registers are those of the integers
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
        const Vec scale = weights[p].scale(kSum);
        Vec minima[2];
        OCTAVO_UNROLL
        for (int sub = 0; sub < Group::kMinima; ++sub) {
            minima[sub] = weights[p].minimum(sub);
        }
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            const auto* group = reinterpret_cast<const ActivationGroup*>(x + r * x_stride);
            Vec sum = fma(to_floats(sums[r][p]), scale * broadcast(group->scale), out.get(r, p));
            if constexpr (Group::kMinima == 1) {
                sum = fma(minima[0], broadcast(group->sum), sum);
            } else if constexpr (Group::kMinima == 2) {
                sum = fma(minima[0], broadcast(group->half_sums[0]), sum);
                sum = fma(minima[1], broadcast(group->half_sums[1]), sum);
            }
            out.set(r, p, sum);
        }
    }
}

template <int R, int P, class Group, class Out>
OCTAVO_INLINE void add_group(const Group (&weights)[P], const std::byte* x, int64_t x_stride,
                             Out& out) {
    static_assert(Group::kSums == 1 || Group::kMinima == 0);
    add_sum<0, R, P>(weights, x, x_stride, out);
    if constexpr (Group::kSums == 2) {
        add_sum<1, R, P>(weights, x, x_stride, out);
    }
}

// A panel as it is packed. Nothing behind `fetch_end` is fetched: it is another worker's, or
// nobody's.
struct FetchedPanel {
    const std::byte* data;
    const std::byte* fetch_end;
};

// How far ahead a group of a panel fetches: with few rows, memory is the limit. A group's own place
// costs next to nothing.
OCTAVO_INLINE int64_t bytes_ahead(const std::byte* group, const std::byte* end) {
    return end - group > kAheadBytes ? kAheadBytes : 0;
}

// Of P panels of one packing, the groups at one place after the other.
template <Packing kPacking, int P>
class PackedPanels {
  public:
    using Group = PackedGroup<kPacking>;

    OCTAVO_INLINE explicit PackedPanels(const FetchedPanel* panels) {
        OCTAVO_UNROLL
        for (int p = 0; p < P; ++p) {
            panels_[p] = panels[p];
            blocks_[p] = panels[p].data + kFormat.factors_bytes();
        }
    }

    // Calls f(groups) for each place.
    template <class F>
    OCTAVO_INLINE void for_each(int64_t num_groups, F f) {
        for (int64_t first = 0; first < num_groups; first += kFormat.block_groups()) {
            const std::byte* groups[P];
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                groups[p] = blocks_[p] + kFormat.header_bytes();
            }
            for (int64_t g = 0; g < kFormat.block_groups(); ++g) {
                OCTAVO_UNROLL
                for (int p = 0; p < P; ++p) {
                    const int64_t ahead = bytes_ahead(groups[p], panels_[p].fetch_end);
                    for (int64_t line = 0; line < kFormat.group_bytes(); line += 64) {
                        prefetch(groups[p] + line + ahead);
                    }
                }
                if constexpr (P == 1) {
                    const Group of[] = {{panels_[0].data, blocks_[0], groups[0]}};
                    f(of);
                } else {
                    static_assert(P == 2);
                    const Group of[] = {{panels_[0].data, blocks_[0], groups[0]},
                                        {panels_[1].data, blocks_[1], groups[1]}};
                    f(of);
                }
                OCTAVO_UNROLL
                for (int p = 0; p < P; ++p) {
                    groups[p] += kFormat.group_bytes();
                }
            }
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                blocks_[p] += kFormat.block_bytes();
            }
        }
    }

  private:
    static constexpr Format kFormat = format_of(kPacking);

    FetchedPanel panels_[P];
    const std::byte* blocks_[P];
};

// P whole panels as they are packed.
template <Packing kPacking, int R, int P>
void dot_packed(const FetchedPanel* panels, int64_t num_groups, const std::byte* x,
                int64_t x_stride, float* out) {
    Floats<R, P> floats(out);
    PackedPanels<kPacking, P>(panels).for_each(num_groups, [&](const auto& weights) {
        add_group<R, P>(weights, x, x_stride, floats);
        x += kGroupStride;
    });
    floats.finish();
}

// The floats go on by one group of bytes: the same numbers in the same order as add_group's.
template <int R, int P, class Group, class Out>
OCTAVO_INLINE void add_bytes(const Group (&weights)[P], const std::byte* x, int64_t x_stride,
                             Out& out) {
    ByteSums sums[R][P] = {};
    OCTAVO_UNROLL_PAIRS
    for (int i = 0; i < kGroupPairs / 2; ++i) {
        Quads w[P];
        OCTAVO_UNROLL
        for (int p = 0; p < P; ++p) {
            w[p] = weights[p].quad(i);
        }
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                sums[r][p] = multiply_add(sums[r][p], w[p], x + i * 4 + r * x_stride);
            }
        }
    }
    asm volatile("" ::: "memory");
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
        const Vec scale = weights[p].scale(0);
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            const auto* group = reinterpret_cast<const ByteGroup*>(x + r * x_stride);
            Vec dot = to_floats(total(sums[r][p], Group::kBytes.offset * group->integer_sum));
            if constexpr (Group::kFormat.has_small()) {
                dot = dot * weights[p].small_scale();  // below 2^24, so it is exact
            }
            Vec sum = fma(dot, scale * broadcast(group->scale), out.get(r, p));
            if constexpr (Group::kMinima == 1) {
                sum = fma(weights[p].minimum(0), broadcast(group->sum), sum);
            }
            out.set(r, p, sum);
        }
    }
}

template <Packing kPacking, int R, int P>
void dot_bytes(const FetchedPanel* panels, int64_t num_groups, const std::byte* x, int64_t x_stride,
               float* out) {
    Floats<R, P> floats(out);
    PackedPanels<kPacking, P>(panels).for_each(num_groups, [&](const auto& weights) {
        add_bytes<R, P>(weights, x, x_stride, floats);
        x += sizeof(ByteGroup);
    });
    floats.finish();
}

template <Packing kPacking>
void unpack(const std::byte* panel, int64_t first_group, int64_t num_groups, UnpackedGroup* to) {
    constexpr Format kFormat = format_of(kPacking);
    for (int64_t g = first_group; g < first_group + num_groups; ++g, to += kIntegerPanels) {
        const std::byte* block =
            panel + kFormat.factors_bytes() + g / kFormat.block_groups() * kFormat.block_bytes();
        const PackedGroup<kPacking> group(
            panel, block,
            block + kFormat.header_bytes() + g % kFormat.block_groups() * kFormat.group_bytes());
        OCTAVO_UNROLL_PAIRS
        for (int i = 0; i < kGroupPairs; ++i) {
            store_words(to->words + i * kChunkBytes, group.pair(i));
        }
        constexpr int kSums = PackedGroup<kPacking>::kSums;
        for (int sum = 0; sum < kSums; ++sum) {
            store(to->factors[sum], group.scale(sum));
        }
        for (int sub = 0; sub < PackedGroup<kPacking>::kMinima; ++sub) {
            store(to->factors[kSums + sub], group.minimum(sub));
        }
    }
}

// Groups of P panels: [group][panel].
template <int Sums, int Minima, int R, int P>
void dot_unpacked(const UnpackedGroup* groups, int64_t num_groups, const std::byte* x,
                  int64_t x_stride, float* out) {
    FloatsInMemory<R, P> floats(out);
    for (int64_t g = 0; g < num_groups; ++g, groups += kIntegerPanels) {
        if constexpr (P == 1) {
            const Unpacked<Sums, Minima> weights[] = {Unpacked<Sums, Minima>(groups[0])};
            add_group<R, P>(weights, x, x_stride, floats);
        } else {
            const Unpacked<Sums, Minima> weights[] = {Unpacked<Sums, Minima>(groups[0]),
                                                      Unpacked<Sums, Minima>(groups[1])};
            add_group<R, P>(weights, x, x_stride, floats);
        }
        x += kGroupStride;
    }
}

using DotPacked = void (*)(const FetchedPanel*, int64_t, const std::byte*, int64_t, float*);
using DotUnpacked = void (*)(const UnpackedGroup*, int64_t, const std::byte*, int64_t, float*);

constexpr int integer_rows(int panels) {
    return panels == kIntegerPanels ? kIntegerRows / panels : std::min(kIntegerRows, kLoneRows);
}
using DotsUnpacked = std::array<std::array<DotUnpacked, kIntegerRows>, kIntegerPanels>;

template <int kRows>
using DotsPacked = std::array<std::array<DotPacked, kRows>, kPackedPanels>;

// What is needed to multiply by panels of one packing. Tables by panels - 1, rows - 1.
struct IntegerKernels {
    DotsPacked<kPackedRows> dot_packed;
    DotsPacked<kByteRows> dot_bytes;  // none where codes are no bytes
    void (*unpack)(const std::byte*, int64_t, int64_t, UnpackedGroup*);
    const DotsUnpacked* dot_unpacked;
    std::array<int, kPackedPanels> packed_rows;
    int few_rows;
};

template <int Sums, int Minima, int P, int... Row>
constexpr std::array<DotUnpacked, kIntegerRows> dots_of(std::integer_sequence<int, Row...>) {
    return {dot_unpacked<Sums, Minima, Row + 1, P>...};
}
template <int Sums, int Minima>
constexpr DotsUnpacked kDotsUnpacked = {
    dots_of<Sums, Minima, 1>(std::make_integer_sequence<int, integer_rows(1)>()),
    dots_of<Sums, Minima, 2>(std::make_integer_sequence<int, integer_rows(2)>())};

template <Packing kPacking, int P, int... Row>
constexpr std::array<DotPacked, kPackedRows> dots_packed(std::integer_sequence<int, Row...>) {
    return {dot_packed<kPacking, Row + 1, P>...};
}
template <Packing kPacking, int P, int... Row>
constexpr std::array<DotPacked, kByteRows> dots_bytes(std::integer_sequence<int, Row...>) {
    return {dot_bytes<kPacking, Row + 1, P>...};
}

template <Packing kPacking, int... Panel>
constexpr IntegerKernels kernels_of(std::integer_sequence<int, Panel...>) {
    constexpr Format kFormat = format_of(kPacking);
    IntegerKernels kernels = {
        {dots_packed<kPacking, Panel + 1>(
            std::make_integer_sequence<int, packed_rows(kFormat, Panel + 1)>())...},
        {},
        unpack<kPacking>,
        &kDotsUnpacked<PackedGroup<kPacking>::kSums, PackedGroup<kPacking>::kMinima>,
        {packed_rows(kFormat, Panel + 1)...},
        few_rows(kFormat)};
    if constexpr (takes_bytes(kFormat)) {
        kernels.dot_bytes = {dots_bytes<kPacking, Panel + 1>(
            std::make_integer_sequence<int, byte_rows(Panel + 1)>())...};
    }
    return kernels;
}

template <Packing kPacking>
constexpr IntegerKernels kernels_of() {
    if constexpr (format_of(kPacking).is_integer()) {
        return kernels_of<kPacking>(std::make_integer_sequence<int, kPackedPanels>());
    } else {
        return {};
    }
}

template <int... Index>
constexpr std::array<IntegerKernels, sizeof...(Index)> all_kernels(
    std::integer_sequence<int, Index...>) {
    return {kernels_of<static_cast<Packing>(Index)>()...};
}

// By packing.
constexpr auto kIntegerKernels = all_kernels(std::make_integer_sequence<int, kNumPackings>());

}  // namespace
}  // namespace octavo::cpu::OCTAVO_ISA
