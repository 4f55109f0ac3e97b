// AMX tiles in software, beside the AVX-512 of avx512.h; whatever the processor would refuse, ends
// the program.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulated/avx512.h"

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

namespace octavo::emulated {

struct Tile {
    int rows = 0;
    int row_bytes = 0;
    alignas(64) uint8_t data[16][64] = {};
};

inline thread_local Tile tiles[8];

inline void require(bool condition, const char* what) {
    if (!condition) {
        std::fprintf(stderr, "AMX: %s\n", what);
        std::abort();
    }
}

inline Tile& configured(int index) {
    require(tiles[index].rows > 0, "a tile is used before its configuration");
    return tiles[index];
}

inline void load_config(const void* from) {
    const auto* bytes = static_cast<const uint8_t*>(from);
    require(bytes[0] == 1 && bytes[1] == 0, "palette or start row");
    for (int i = 0; i < 8; ++i) {
        uint16_t row_bytes = 0;
        std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
        require(row_bytes <= 64 && bytes[48 + i] <= 16, "a tile is too large");
        tiles[i] = {};
        tiles[i].rows = bytes[48 + i];
        tiles[i].row_bytes = row_bytes;
    }
}

inline void release() {
    for (Tile& tile : tiles) {
        tile = {};
    }
}

inline void zero(int index) { std::memset(configured(index).data, 0, sizeof(Tile::data)); }

inline void load(int index, const void* from, int64_t stride) {
    Tile& tile = configured(index);
    std::memset(tile.data, 0, sizeof tile.data);
    for (int row = 0; row < tile.rows; ++row) {
        std::memcpy(tile.data[row], static_cast<const uint8_t*>(from) + row * stride,
                    static_cast<size_t>(tile.row_bytes));
    }
}

inline void store(int index, void* to, int64_t stride) {
    const Tile& tile = configured(index);
    for (int row = 0; row < tile.rows; ++row) {
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, tile.data[row],
                    static_cast<size_t>(tile.row_bytes));
    }
}

inline void require_shapes(const Tile& c, const Tile& a, const Tile& b) {
    require(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows,
            "the shapes of tiles do not fit");
}

// Products of bytes, of which the left ones may have no sign.
template <class Left>
inline void multiply_add_bytes(int sums, int left, int right) {
    Tile& c = configured(sums);
    const Tile& a = configured(left);
    const Tile& b = configured(right);
    require_shapes(c, a, b);
    for (int m = 0; m < c.rows; ++m) {
        for (int n = 0; n < c.row_bytes / 4; ++n) {
            int32_t sum = 0;
            std::memcpy(&sum, c.data[m] + 4 * n, sizeof sum);
            for (int k = 0; k < a.row_bytes; ++k) {
                sum += static_cast<Left>(a.data[m][k]) *
                       static_cast<int8_t>(b.data[k / 4][4 * n + k % 4]);
            }
            std::memcpy(c.data[m] + 4 * n, &sum, sizeof sum);
        }
    }
}

// Products of first and of second numbers of the pairs are summed apart, from zero, then together,
// and that is added to the tile.
inline void multiply_add_bf16(int sums, int left, int right) {
    Tile& c = configured(sums);
    const Tile& a = configured(left);
    const Tile& b = configured(right);
    require_shapes(c, a, b);
    for (int m = 0; m < c.rows; ++m) {
        float first[16] = {};
        float second[16] = {};
        for (int k = 0; k < b.rows; ++k) {
            uint32_t x = 0;
            uint32_t w[16];
            std::memcpy(&x, a.data[m] + 4 * k, 4);
            std::memcpy(w, b.data[k], sizeof w);
            for (int n = 0; n < 16; ++n) {
                first[n] = fma_bf16(x & 0xffffU, w[n] & 0xffffU, first[n]);
                second[n] = fma_bf16(x >> 16, w[n] >> 16, second[n]);
            }
        }
        float sum[16];
        std::memcpy(sum, c.data[m], sizeof sum);
        for (int n = 0; n < 16; ++n) {
            sum[n] = add(sum[n], add(first[n], second[n]));
        }
        std::memcpy(c.data[m], sum, static_cast<size_t>(c.row_bytes));
    }
}

}  // namespace octavo::emulated

#undef _tile_zero  // GCC's are macros
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig(from) octavo::emulated::load_config(from)
#define _tile_release() octavo::emulated::release()
#define _tile_zero(tile) octavo::emulated::zero(tile)
#define _tile_loadd(tile, from, stride) octavo::emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) octavo::emulated::store(tile, to, stride)
#define _tile_dpbf16ps(sums, left, right) octavo::emulated::multiply_add_bf16(sums, left, right)
#define _tile_dpbssd(sums, left, right) \
    octavo::emulated::multiply_add_bytes<int8_t>(sums, left, right)
#define _tile_dpbusd(sums, left, right) \
    octavo::emulated::multiply_add_bytes<uint8_t>(sums, left, right)
