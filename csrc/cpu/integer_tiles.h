// The integer dot kernel with AMX: tiles of up to 16 rows of activations times one panel.
//
// The processor sums products of bytes, so the sums are those of integer_dot.h, and what follows
// does the same with them: not a bit differs, whatever the number of rows. Activations of 16 bits
// are two bytes, the low one without a sign. A group's sums leave their tile at once, for each
// group has its scale.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/integer_dot.h"
#include "cpu/tiles.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

constexpr int kHeightStep = 4;  // what is computed for tiles of some heights is the same
constexpr int kHeights = kTileHeight / kHeightStep;

// Fewer rows meet panels as they are packed.
constexpr int64_t kFewestTiled = 12;

// 16 rows of ActivationGroup side by side, low and high bytes apart; and of ByteGroup. They take as
// much room as those.
struct alignas(64) WordRows {
    using Row = ActivationGroup;

    std::byte low[kTileHeight][kGroupColumns];
    std::byte high[kTileHeight][kGroupColumns];
    float scales[kTileHeight];
    float sums[kTileHeight];
    float half_sums[2][kTileHeight];  // for those that are taken out again

    OCTAVO_INLINE void put(int64_t r, const ActivationGroup& row) {
        const __m512i words = _mm512_loadu_si512(row.q);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(low[r]), _mm512_cvtepi16_epi8(words));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(high[r]),
                            _mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 8)));
        scales[r] = row.scale;
        sums[r] = row.sum;
        half_sums[0][r] = row.half_sums[0];
        half_sums[1][r] = row.half_sums[1];
    }
    OCTAVO_INLINE void take(int64_t r, ActivationGroup* row) const {
        for (int64_t c = 0; c < kGroupColumns; ++c) {
            row->q[c] = static_cast<int16_t>(std::to_integer<int>(low[r][c]) |
                                             std::to_integer<int>(high[r][c]) << 8);
        }
        row->scale = scales[r];
        row->sum = sums[r];
        row->half_sums[0] = half_sums[0][r];
        row->half_sums[1] = half_sums[1][r];
    }
};
static_assert(sizeof(WordRows) == kTileHeight * sizeof(ActivationGroup));

struct alignas(64) ByteRows {
    using Row = ByteGroup;

    std::byte low[kTileHeight][kGroupColumns];
    float scales[kTileHeight];
    float sums[kTileHeight];
    int32_t integer_sums[kTileHeight];

    OCTAVO_INLINE void put(int64_t r, const ByteGroup& row) {
        std::memcpy(low[r], row.q, kGroupColumns);
        scales[r] = row.scale;
        sums[r] = row.sum;
        integer_sums[r] = row.integer_sum;
    }
    OCTAVO_INLINE void take(int64_t r, ByteGroup* row) const {
        std::memcpy(row->q, low[r], kGroupColumns);
        row->scale = scales[r];
        row->sum = sums[r];
        row->integer_sum = integer_sums[r];
    }
};
static_assert(sizeof(ByteRows) == kTileHeight * sizeof(ByteGroup));

// Rows lie in tiles, and each tile in groups. Where one is, of `num_groups`:
template <class Rows>
OCTAVO_INLINE Rows* tile_of(std::byte* rows, int64_t row, int64_t num_groups) {
    return reinterpret_cast<Rows*>(rows) + row / kTileHeight * num_groups;
}

template <class Rows>
void take_row(const std::byte* rows, int64_t row, int64_t num_groups, std::byte* to) {
    const auto* from = reinterpret_cast<const Rows*>(rows) + row / kTileHeight * num_groups;
    for (int64_t g = 0; g < num_groups; ++g) {
        from[g].take(row % kTileHeight, reinterpret_cast<typename Rows::Row*>(to) + g);
    }
}

// What rows are multiplied as: bytes of ByteRows, low bytes of WordRows, or both.
enum class RowForm : uint8_t { Bytes, Low, Both };
constexpr int kRowForms = 3;

// A group of 16 rows of weights, in the order in which the rows of activations are.
struct alignas(64) TiledGroup {
    std::byte quads[kGroupColumns / 4 * kChunkBytes];  // with a sign
    int32_t small[kLanes];                             // the small scales, where there are some
    float scales[kLanes];
    float minima[kLanes];
};

// Formats with two scales for a group would be four products and four stores: slower than without
// tiles.
constexpr bool takes_tiles(const Format& format) { return format.is_integer() && format.subs == 1; }

// What the code of a format is made for.
struct TileKind {
    bool has_minima, has_small;
};

// Two pairs of numbers that fit bytes: the first and the third byte of their words.
OCTAVO_INLINE __m512i as_quad(Pairs first, Pairs second) {
    const __m512i words = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    const __m512i low = _mm512_set1_epi32(static_cast<int32_t>(0x80800200));
    const __m512i high = _mm512_set1_epi32(0x02008080);
    return _mm512_or_si512(_mm512_shuffle_epi8(first.all, _mm512_add_epi8(words, low)),
                           _mm512_shuffle_epi8(second.all, _mm512_add_epi8(words, high)));
}

OCTAVO_INLINE __m512i small_words(const std::byte* from, int mask) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(static_cast<int8_t>(mask))));
}

// All groups of a panel. What comes behind them is fetched meanwhile, up to `panel.fetch_end`.
template <Packing kPacking, bool kAreQuads>
void unpack_tiles(const FetchedPanel& panel, int64_t num_groups, TiledGroup* to) {
    constexpr Format kFormat = format_of(kPacking);
    using Group = PackedGroup<kPacking>;
    PackedPanels<kPacking, 1>(&panel).for_each(num_groups, [&](const auto& groups) {
        const Group& group = groups[0];
        OCTAVO_UNROLL_PAIRS
        for (int i = 0; i < kGroupPairs / 2; ++i) {
            std::byte* quad = to->quads + i * kChunkBytes;
            if constexpr (kAreQuads) {
                const __m512i offset = _mm512_set1_epi8(static_cast<int8_t>(Group::kBytes.offset));
                _mm512_store_si512(quad, _mm512_sub_epi8(group.quad(i).all, offset));
            } else {
                _mm512_store_si512(quad, as_quad(group.integers(2 * i), group.integers(2 * i + 1)));
            }
        }
        if constexpr (kFormat.has_small()) {
            _mm512_store_si512(to->small, small_words(group.small(0), Group::kSmallMask));
        }
        store(to->scales, group.scale(0));
        if constexpr (kFormat.has_minima) {
            store(to->minima, group.minimum(0));
        }
        ++to;
    });
}

// The shapes of the processor's tiles: 0 and 1 are sums, of low and of high bytes; 2 and 3 these
// bytes; 4 weights.
inline void set_integer_tiles() {
    TileConfig config;
    config.set(0, kTileHeight, kTileRowBytes);
    config.set(1, kTileHeight, kTileRowBytes);
    config.set(2, kTileHeight, kGroupColumns);
    config.set(3, kTileHeight, kGroupColumns);
    config.set(4, kGroupPairs / 2, kChunkBytes);
    config.load();
}

// out[r][lane] = a tile's first R rows times a panel, rows kOutStride apart. Others are multiplied
// too, which costs nothing, and left where they are.
template <TileKind kKind, RowForm kForm, int R>
class TiledDot {
    using Rows = std::conditional_t<kForm == RowForm::Bytes, ByteRows, WordRows>;

  public:
    OCTAVO_INLINE void run(const TiledGroup* weights, int64_t num_groups, const std::byte* x,
                           float* out) {
        const auto* rows = reinterpret_cast<const Rows*>(x);
        Vec floats[R];
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            floats[r] = broadcast(0.0F);
        }
        multiply(weights[0], rows[0], products_[0]);
        for (int64_t g = 1; g < num_groups; ++g) {
            fetch(rows[std::min(g + kFetchedGroups, num_groups - 1)]);
            multiply(weights[g], rows[g], products_[g % 2]);
            add(weights[g - 1], rows[g - 1], products_[(g - 1) % 2], floats);
        }
        add(weights[num_groups - 1], rows[num_groups - 1], products_[(num_groups - 1) % 2], floats);
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            store(out + r * kOutStride, floats[r]);
        }
    }

  private:
    static constexpr int kBytes = kForm == RowForm::Both ? 2 : 1;

    // Ahead, from the second cache into the first one.
    static constexpr int64_t kFetchedGroups = 2;

    using Products = int32_t[kBytes][kTileHeight][kLanes];

    static OCTAVO_INLINE void fetch(const Rows& rows) {
        for (size_t line = 0; line < sizeof(Rows); line += 64) {
            prefetch(reinterpret_cast<const std::byte*>(&rows) + line);
        }
    }

    // Tile numbers are part of the instructions.
    static OCTAVO_INLINE void multiply(const TiledGroup& weights, const Rows& rows, Products& to) {
        _tile_loadd(4, weights.quads, kChunkBytes);
        _tile_loadd(2, rows.low, kGroupColumns);
        _tile_zero(0);
        if constexpr (kBytes == 1) {
            _tile_dpbssd(0, 2, 4);
        } else {
            _tile_loadd(3, rows.high, kGroupColumns);
            _tile_zero(1);
            _tile_dpbusd(0, 2, 4);
            _tile_dpbssd(1, 3, 4);
            _tile_stored(1, to[1], kTileRowBytes);
        }
        _tile_stored(0, to[0], kTileRowBytes);
    }

    static OCTAVO_INLINE void add(const TiledGroup& weights, const Rows& rows,
                                  const Products& products, Vec (&floats)[R]) {
        const Vec scale = load(weights.scales);
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            __m512i sum = _mm512_load_si512(products[0][r]);
            if constexpr (kBytes == 2) {
                const __m512i high = _mm512_load_si512(products[1][r]);
                sum = _mm512_add_epi32(sum, _mm512_slli_epi32(high, 8));
            }
            if constexpr (kKind.has_small) {
                sum = _mm512_mullo_epi32(sum, _mm512_load_si512(weights.small));
            }
            floats[r] = fma(to_floats({sum}), scale * broadcast(rows.scales[r]), floats[r]);
            if constexpr (kKind.has_minima) {
                floats[r] = fma(load(weights.minima), broadcast(rows.sums[r]), floats[r]);
            }
        }
    }

    alignas(64) Products products_[2];
};

template <TileKind kKind, RowForm kForm, int R>
void dot_tiled(const TiledGroup* weights, int64_t num_groups, const std::byte* x, float* out) {
    written(weights);
    TiledDot<kKind, kForm, R> dot;
    dot.run(weights, num_groups, x, out);
}

using DotTiled = void (*)(const TiledGroup*, int64_t, const std::byte*, float*);
using UnpackTiles = void (*)(const FetchedPanel&, int64_t, TiledGroup*);

// What is needed to multiply by panels of one packing, by the form of rows; dots by height too.
struct TileKernels {
    std::array<std::array<DotTiled, kHeights>, kRowForms> dots;
    std::array<UnpackTiles, kRowForms> unpack;
};

template <Packing kPacking, RowForm kForm, int... Step>
constexpr void add_tile_kernels(TileKernels& kernels, std::integer_sequence<int, Step...>) {
    constexpr Format kFormat = format_of(kPacking);
    constexpr TileKind kKind = {kFormat.has_minima, kFormat.has_small()};
    constexpr auto kIndex = static_cast<size_t>(kForm);
    kernels.dots[kIndex] = {dot_tiled<kKind, kForm, (Step + 1) * kHeightStep>...};
    kernels.unpack[kIndex] = unpack_tiles<kPacking, kForm == RowForm::Bytes>;
}

template <Packing kPacking>
constexpr TileKernels tile_kernels() {
    TileKernels kernels{};
    constexpr auto kSteps = std::make_integer_sequence<int, kHeights>();
    if constexpr (takes_tiles(format_of(kPacking))) {
        add_tile_kernels<kPacking, RowForm::Low>(kernels, kSteps);
        add_tile_kernels<kPacking, RowForm::Both>(kernels, kSteps);
        if constexpr (takes_bytes(format_of(kPacking))) {
            add_tile_kernels<kPacking, RowForm::Bytes>(kernels, kSteps);
        }
    }
    return kernels;
}

template <int... Index>
constexpr std::array<TileKernels, sizeof...(Index)> all_tile_kernels(
    std::integer_sequence<int, Index...>) {
    return {tile_kernels<static_cast<Packing>(Index)>()...};
}

// By packing.
constexpr auto kTileKernels = all_tile_kernels(std::make_integer_sequence<int, kNumPackings>());

// Rows in tiles, times whole panels.
class TiledRows {
  public:
    static int64_t scratch_bytes(int64_t num_groups) {
        return num_groups * static_cast<int64_t>(sizeof(TiledGroup));
    }

    TiledRows(std::byte* scratch, int64_t num_groups)
        : num_groups_(num_groups), weights_(reinterpret_cast<TiledGroup*>(scratch)) {}

    // Rows from the first of a tile on. Up to end(), the processor's tiles are taken.
    void begin(const std::byte* x, int64_t stride, int64_t num_rows, RowForm form) {
        x_ = x;
        stride_ = stride;
        num_rows_ = num_rows;
        form_ = static_cast<size_t>(form);
        set_integer_tiles();
    }
    static void end() { _tile_release(); }

    // y[r][lane], rows kOutStride apart; there is room for those that fill the last tile.
    void multiply(Packing packing, const FetchedPanel& panel, float* y) {
        const TileKernels& kernels = kTileKernels[static_cast<size_t>(packing)];
        kernels.unpack[form_](panel, num_groups_, weights_);
        for (int64_t r = 0; r < num_rows_; r += kTileHeight) {
            const int64_t height = std::min(kTileHeight, num_rows_ - r);
            const auto step = static_cast<size_t>((height - 1) / kHeightStep);
            kernels.dots[form_][step](weights_, num_groups_, x_ + r * stride_, y + r * kOutStride);
        }
    }

  private:
    const int64_t num_groups_;
    TiledGroup* const weights_;  // of the panel at hand
    const std::byte* x_ = nullptr;
    int64_t stride_ = 0;  // bytes of a row, in tiles as alone
    int64_t num_rows_ = 0;
    size_t form_ = 0;
};

}  // namespace
}  // namespace octavo::cpu::OCTAVO_ISA
