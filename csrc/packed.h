// A weight matrix in panels of 16 rows, as the kernels want it.
//
// Panel p holds rows 16 p … 16 p + 15. f32: for each column its 16 rows' values. bf16: for each
// pair of columns (2 j, 2 j + 1) its 16 rows' two values side by side. q8, q4: groups of 32 columns
// of integers with their scales, see cpu/groups.h. Padded with zeros to 16 rows, and 2 columns or
// whole groups.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "common/memory.h"
#include "common/team.h"
#include "cpu/kernels.h"
#include "cpu/quants.h"

namespace octavo {

// Throws ValueError on any other name than "f32", "bf16", "q8" and "q4".
cpu::Packing parse_packing(std::string_view name);
const char* name_of(cpu::Packing packing);

class Packed {
  public:
    Packed(int64_t rows, int64_t cols, cpu::Packing packing);

    int64_t rows() const { return rows_; }
    int64_t cols() const { return cols_; }
    cpu::Packing packing() const { return packing_; }
    int64_t num_bytes() const { return memory_.size(); }
    cpu::Panels panels() const { return {memory_.data(), rows_, cols_, packing_}; }

    // Packs `num_rows` stored rows, in `data` one behind the other, as rows first_row …; row i of
    // them is stored row row_map[i], if there is a map. The integers and scales of Q8_0 go into q8,
    // and those of Q4_0 and Q4_1 into q4, as they are; others are quantised. Throws ValueError when
    // sizes do not agree.
    void pack(Team& team, int64_t first_row, std::span<const std::byte> data, StoredType type,
              int64_t num_rows, std::span<const int32_t> row_map);

    // The matrix [rows, cols].
    void unpack(float* to) const;

  private:
    int64_t rows_;
    int64_t cols_;
    cpu::Packing packing_;
    Memory memory_;
};

}  // namespace octavo
