// What attention does with AMX: up to 16 rows of queries times blocks of 16 tokens.
//
// A K panel is what the processor wants of tiles of weights, 32 columns each, and a V panel is half
// a tile. Each tile's products are summed by the processor, the even and the odd ones apart, and
// then added to what is there: for each row in the same order, whatever other rows there are. A
// token that a row does not see has the weight zero, which changes no sum of finite numbers.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/kv_layer.h"
#include "cpu/simd.h"
#include "cpu/tiles.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

constexpr int64_t kStepColumns = 32;  // of a whole tile of keys
constexpr int64_t kHalfTileBytes = kTileBytes / 2;

// The shapes of the processor's tiles: 0 … 3 are sums; 4 queries, 5 half as many columns of them,
// or weights of a block; 6 keys, 7 half as many columns of them, or values of a block.
inline void set_attention_tiles(int64_t height) {
    TileConfig config;
    for (int sums = 0; sums < 4; ++sums) {
        config.set(sums, height, kTileRowBytes);
    }
    config.set(4, height, kTileRowBytes);
    config.set(5, height, kTileRowBytes / 2);
    config.set(6, kTileHeight, kTileRowBytes);
    config.set(7, kTileHeight / 2, kTileRowBytes);
    config.load();
}

// Rows of a matrix that a tile is read from or written to, `stride` bytes apart.
template <class T>
struct StridedRows {
    T* data;
    int64_t stride;
};

// What is fetched while a panel is read: from `from` on, `step_bytes` for each line of the panel.
struct FetchedLines {
    const std::byte* from;
    int64_t step_bytes;

    OCTAVO_INLINE void fetch(int64_t first, int64_t count) const {
        for (int64_t line = first; line < first + count; ++line) {
            prefetch(from + line * step_bytes);
        }
    }
};

// Calls f(0) … f(N - 1), which may use their argument as a constant: tile numbers are part of the
// instructions.
template <int N, class F>
OCTAVO_INLINE void for_tiles(F f) {
    if constexpr (N > 0) {
        for_tiles<N - 1>(f);
        f(std::integral_constant<int, N - 1>());
    }
}

#define OCTAVO_FOR_TILE(tile, statement_of) \
    if constexpr ((tile) == 0) {            \
        statement_of(0);                    \
    } else if constexpr ((tile) == 1) {     \
        statement_of(1);                    \
    } else if constexpr ((tile) == 2) {     \
        statement_of(2);                    \
    } else {                                \
        statement_of(3);                    \
    }

// out[r][block * 16 + token] = queries · keys, of N blocks.
template <int N>
void multiply_keys(StridedRows<const uint16_t> queries, int64_t dim, const std::byte* const* keys,
                   const FetchedLines* fetched, StridedRows<float> out) {
    written(queries.data);
    for_tiles<N>([&](auto tile) {
#define OCTAVO_ZERO(t) _tile_zero(t)
        OCTAVO_FOR_TILE(tile.value, OCTAVO_ZERO)
#undef OCTAVO_ZERO
    });
    const int64_t steps = dim / kStepColumns;
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(4, queries.data + step * kStepColumns, queries.stride);
        for_tiles<N>([&](auto tile) {
            fetched[tile.value].fetch(step * kTileHeight, kTileHeight);
            _tile_loadd(6, keys[tile.value] + step * kTileBytes, kTileRowBytes);
#define OCTAVO_MULTIPLY(t) _tile_dpbf16ps(t, 4, 6)
            OCTAVO_FOR_TILE(tile.value, OCTAVO_MULTIPLY)
#undef OCTAVO_MULTIPLY
        });
    }
    if (dim % kStepColumns != 0) {
        _tile_loadd(5, queries.data + steps * kStepColumns, queries.stride);
        for_tiles<N>([&](auto tile) {
            fetched[tile.value].fetch(steps * kTileHeight, kTileHeight / 2);
            _tile_loadd(7, keys[tile.value] + steps * kTileBytes, kTileRowBytes);
#define OCTAVO_MULTIPLY(t) _tile_dpbf16ps(t, 5, 7)
            OCTAVO_FOR_TILE(tile.value, OCTAVO_MULTIPLY)
#undef OCTAVO_MULTIPLY
        });
    }
    for_tiles<N>([&](auto tile) {
        float* to = out.data + tile.value * kBlockTokens;
#define OCTAVO_STORE(t) _tile_stored(t, to, out.stride)
        OCTAVO_FOR_TILE(tile.value, OCTAVO_STORE)
#undef OCTAVO_STORE
    });
}

// out[r][16 columns of panel] += weights · values, of N panels of each block; panel p of block b is
// values[b] + p * kHalfTileBytes. Weights of blocks follow each other in a row.
template <int N>
void multiply_values(StridedRows<const uint16_t> weights, const std::byte* const* values,
                     const FetchedLines* fetched, int64_t num_blocks, StridedRows<float> out) {
    written(weights.data);
    for_tiles<N>([&](auto tile) {
        const float* from = out.data + tile.value * kLanes;
#define OCTAVO_LOAD(t) _tile_loadd(t, from, out.stride)
        OCTAVO_FOR_TILE(tile.value, OCTAVO_LOAD)
#undef OCTAVO_LOAD
    });
    for (int64_t b = 0; b < num_blocks; ++b) {
        _tile_loadd(5, weights.data + b * kBlockTokens, weights.stride);
        for_tiles<N>([&](auto tile) {
            fetched[b].fetch(tile.value * kTileHeight / 2, kTileHeight / 2);
            _tile_loadd(7, values[b] + tile.value * kHalfTileBytes, kTileRowBytes);
#define OCTAVO_MULTIPLY(t) _tile_dpbf16ps(t, 5, 7)
            OCTAVO_FOR_TILE(tile.value, OCTAVO_MULTIPLY)
#undef OCTAVO_MULTIPLY
        });
    }
    for_tiles<N>([&](auto tile) {
        float* to = out.data + tile.value * kLanes;
#define OCTAVO_STORE(t) _tile_stored(t, to, out.stride)
        OCTAVO_FOR_TILE(tile.value, OCTAVO_STORE)
#undef OCTAVO_STORE
    });
}

// A V panel of which only some tokens are there, zeros for the others. Whether all are finite.
OCTAVO_INLINE bool copy_tokens(const std::byte* panel, int64_t first, int64_t end, std::byte* to) {
    const __m512i exponents = _mm512_set1_epi16(0x7f80);
    __m512i highest = _mm512_setzero_si512();
    for (int64_t pair = 0; pair < kBlockTokens / 2; ++pair) {
        const auto is_seen = [&](int64_t token) { return first <= token && token < end; };
        const uint32_t halves =
            (is_seen(2 * pair) ? 0xffffU : 0U) | (is_seen(2 * pair + 1) ? 0xffff0000U : 0U);
        const __m512i values = _mm512_and_si512(_mm512_loadu_si512(panel + pair * kTileRowBytes),
                                                _mm512_set1_epi32(static_cast<int32_t>(halves)));
        highest = _mm512_max_epi16(highest, _mm512_and_si512(values, exponents));
        _mm512_storeu_si512(to + pair * kTileRowBytes, values);
    }
    alignas(64) int16_t each[32];
    _mm512_store_si512(each, highest);
    return *std::max_element(each, each + 32) < 0x7f80;
}

}  // namespace
}  // namespace octavo::cpu::OCTAVO_ISA
