// The integer dot kernel: some rows of quantised activations times one panel, group by group.
//
// Few rows meet the panel as it is packed. For more, some of its groups are unpacked to 16 bits
// once, and all rows' tiles sweep them. Codes that are multiplied as bytes are never unpacked: a
// shift and a mask for four columns are little even beside a single tile.
#pragma once

#include <array>
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

// Rows that take the packed form at a time, and how many of them are few: three times unpacked is
// still cheaper than stored once, where a shift and a mask are all there is to it.
constexpr bool is_simple(const Format& format) {
    return !format.has_small() && format.high_bits() == 0 && format.codes < Codes::Nonlinear;
}
constexpr int packed_rows(const Format& format) {
    return is_simple(format) ? kPackedRows : kPackedRows / 2;
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

// out[r][p][lane] goes on by one of the sums of a group of each of P panels. The floats stay in
// memory, and the registers hold the integers.
template <int kSum, int R, int P, class Group>
OCTAVO_INLINE void add_sum(const Group (&weights)[P], const std::byte* x, int64_t x_stride,
                           float* out) {
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
            float* to = out + r * kOutStride + p * kLanes;
            Vec sum = fma(to_floats(sums[r][p]), scale * broadcast(group->scale), load(to));
            if constexpr (Group::kMinima == 1) {
                sum = fma(minima[0], broadcast(group->sum), sum);
            } else if constexpr (Group::kMinima == 2) {
                sum = fma(minima[0], broadcast(group->half_sums[0]), sum);
                sum = fma(minima[1], broadcast(group->half_sums[1]), sum);
            }
            store(to, sum);
        }
    }
}

template <int R, int P, class Group>
OCTAVO_INLINE void add_group(const Group (&weights)[P], const std::byte* x, int64_t x_stride,
                             float* out) {
    static_assert(Group::kSums == 1 || Group::kMinima == 0);
    add_sum<0, R, P>(weights, x, x_stride, out);
    if constexpr (Group::kSums == 2) {
        add_sum<1, R, P>(weights, x, x_stride, out);
    }
}

// How far ahead a group of a panel fetches: with few rows, memory is the limit. Nothing behind
// `end`, which is another worker's, or nobody's; a group's own place costs next to nothing.
OCTAVO_INLINE int64_t bytes_ahead(const std::byte* group, const std::byte* end) {
    return end - group > kAheadBytes ? kAheadBytes : 0;
}

// A whole panel as it is packed.
template <Packing kPacking, int R>
void dot_packed(const std::byte* panel, int64_t num_groups, const std::byte* fetch_end,
                const std::byte* x, int64_t x_stride, float* out) {
    constexpr Format kFormat = format_of(kPacking);
    const std::byte* block = panel + kFormat.factors_bytes();
    for (int64_t first = 0; first < num_groups; first += kFormat.block_groups()) {
        const std::byte* group = block + kFormat.header_bytes();
        for (int64_t g = 0; g < kFormat.block_groups(); ++g) {
            const int64_t ahead = bytes_ahead(group, fetch_end);
            for (int64_t line = 0; line < kFormat.group_bytes(); line += 64) {
                prefetch(group + line + ahead);
            }
            const PackedGroup<kPacking> weights[] = {{panel, block, group}};
            add_group<R, 1>(weights, x, x_stride, out);
            group += kFormat.group_bytes();
            x += kGroupStride;
        }
        block += kFormat.block_bytes();
    }
}

// out[r][lane] goes on by one group of bytes: the same numbers in the same order as add_group's.
template <Packing kPacking, int R>
OCTAVO_INLINE void add_bytes(const PackedGroup<kPacking>& weights, const std::byte* x,
                             int64_t x_stride, float* out) {
    using Group = PackedGroup<kPacking>;
    ByteSums sums[R] = {};
    OCTAVO_UNROLL_PAIRS
    for (int i = 0; i < kGroupPairs / 2; ++i) {
        const Quads w = weights.quad(i);
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            sums[r] = multiply_add(sums[r], w, x + i * 4 + r * x_stride);
        }
    }
    asm volatile("" ::: "memory");
    const Vec scale = weights.scale(0);
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
        const auto* group = reinterpret_cast<const ByteGroup*>(x + r * x_stride);
        float* to = out + r * kOutStride;
        Vec dot = to_floats(total(sums[r], Group::kBytes.offset * group->integer_sum));
        if constexpr (Group::kFormat.has_small()) {
            dot = dot * weights.small_scale();  // below 2^24, so it is exact
        }
        Vec sum = fma(dot, scale * broadcast(group->scale), load(to));
        if constexpr (Group::kMinima == 1) {
            sum = fma(weights.minimum(0), broadcast(group->sum), sum);
        }
        store(to, sum);
    }
}

// A whole panel as it is packed.
template <Packing kPacking, int R>
void dot_bytes(const std::byte* panel, int64_t num_groups, const std::byte* fetch_end,
               const std::byte* x, int64_t x_stride, float* out) {
    constexpr Format kFormat = format_of(kPacking);
    const std::byte* block = panel + kFormat.factors_bytes();
    for (int64_t first = 0; first < num_groups; first += kFormat.block_groups()) {
        const std::byte* group = block + kFormat.header_bytes();
        for (int64_t g = 0; g < kFormat.block_groups(); ++g) {
            const int64_t ahead = bytes_ahead(group, fetch_end);
            for (int64_t line = 0; line < kFormat.group_bytes(); line += 64) {
                prefetch(group + line + ahead);
            }
            add_bytes<kPacking, R>({panel, block, group}, x, x_stride, out);
            group += kFormat.group_bytes();
            x += sizeof(ByteGroup);
        }
        block += kFormat.block_bytes();
    }
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
    for (int64_t g = 0; g < num_groups; ++g, groups += kIntegerPanels) {
        if constexpr (P == 1) {
            const Unpacked<Sums, Minima> weights[] = {Unpacked<Sums, Minima>(groups[0])};
            add_group<R, P>(weights, x, x_stride, out);
        } else {
            const Unpacked<Sums, Minima> weights[] = {Unpacked<Sums, Minima>(groups[0]),
                                                      Unpacked<Sums, Minima>(groups[1])};
            add_group<R, P>(weights, x, x_stride, out);
        }
        x += kGroupStride;
    }
}

using DotPacked = void (*)(const std::byte*, int64_t, const std::byte*, const std::byte*, int64_t,
                           float*);
using DotUnpacked = void (*)(const UnpackedGroup*, int64_t, const std::byte*, int64_t, float*);

constexpr int integer_rows(int panels) { return kIntegerRows / panels; }
using DotsUnpacked = std::array<std::array<DotUnpacked, kIntegerRows>, kIntegerPanels>;

// What is needed to multiply by panels of one packing.
struct IntegerKernels {
    std::array<DotPacked, kPackedRows> dot_packed;  // by rows - 1
    std::array<DotPacked, kByteRows> dot_bytes;     // the same; none where codes are no bytes
    void (*unpack)(const std::byte*, int64_t, int64_t, UnpackedGroup*);
    const DotsUnpacked* dot_unpacked;  // by panels - 1, rows - 1
    int packed_rows, few_rows;
};

template <int Sums, int Minima, int P, int... Row>
constexpr std::array<DotUnpacked, kIntegerRows> dots_of(std::integer_sequence<int, Row...>) {
    return {dot_unpacked<Sums, Minima, Row + 1, P>...};
}
template <int Sums, int Minima>
constexpr DotsUnpacked kDotsUnpacked = {
    dots_of<Sums, Minima, 1>(std::make_integer_sequence<int, integer_rows(1)>()),
    dots_of<Sums, Minima, 2>(std::make_integer_sequence<int, integer_rows(2)>())};

template <Packing kPacking, int... Row>
constexpr auto dots_packed(std::integer_sequence<int, Row...>) {
    return std::array<DotPacked, kPackedRows>{dot_packed<kPacking, Row + 1>...};
}
template <Packing kPacking, int... Row>
constexpr auto dots_bytes(std::integer_sequence<int, Row...>) {
    return std::array<DotPacked, sizeof...(Row)>{dot_bytes<kPacking, Row + 1>...};
}

template <Packing kPacking>
constexpr IntegerKernels kernels_of() {
    if constexpr (!format_of(kPacking).is_integer()) {
        return {};
    } else {
        constexpr Format kFormat = format_of(kPacking);
        IntegerKernels kernels = {
            dots_packed<kPacking>(std::make_integer_sequence<int, packed_rows(kFormat)>()),
            {},
            unpack<kPacking>,
            &kDotsUnpacked<PackedGroup<kPacking>::kSums, PackedGroup<kPacking>::kMinima>,
            packed_rows(kFormat),
            few_rows(kFormat)};
        if constexpr (takes_bytes(kFormat)) {
            kernels.dot_bytes = dots_bytes<kPacking>(std::make_integer_sequence<int, kByteRows>());
        }
        return kernels;
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
