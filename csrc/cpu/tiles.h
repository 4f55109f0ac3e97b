// AMX: registers of up to 16 rows of 64 bytes, and what the processor must know of them first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

constexpr int64_t kTileHeight = 16;
constexpr int64_t kTileRowBytes = 64;
constexpr int64_t kTileBytes = kTileHeight * kTileRowBytes;

// Compilers do not know that the instructions on tiles read memory: what was written for them has
// to be there first.
OCTAVO_INLINE void written(const void* address) { asm volatile("" : : "r"(address) : "memory"); }

// What LDTILECFG reads: the shapes of tiles.
class alignas(64) TileConfig {
  public:
    void set(int tile, int64_t rows, int64_t row_bytes) {
        rows_[tile] = static_cast<uint8_t>(rows);
        row_bytes_[tile] = static_cast<uint16_t>(row_bytes);
    }
    void load() const {
        written(this);
        _tile_loadconfig(this);
    }

  private:
    uint8_t palette_ = 1;
    uint8_t start_row_ = 0;
    uint8_t reserved_[14] = {};
    uint16_t row_bytes_[16] = {};
    uint8_t rows_[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace
}  // namespace octavo::cpu::OCTAVO_ISA
