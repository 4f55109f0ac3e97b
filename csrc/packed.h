// A weight matrix in panels of 16 rows, as the kernels want it.
//
// Panel p holds rows 16 p … 16 p + 15. f32: for each column its 16 rows' values. bf16: for each
// pair of columns (2 j, 2 j + 1) its 16 rows' two values side by side. Integers: see cpu/formats.h.
// Padded with zeros to 16 rows, and 2 columns or whole groups.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "common/memory.h"
#include "common/team.h"
#include "cpu/kernels.h"
#include "cpu/quants.h"

namespace octavo {

// Throws ValueError on a name that no format has.
cpu::Packing parse_packing(std::string_view name);

class Packed {
  public:
    struct Part {
        int64_t rows;
        cpu::Packing packing;
    };

    // Which rows of a larger matrix these are.
    struct Cut {
        int64_t first_row = 0;
        int64_t total_rows = 0;
        // These are first_row … of its upper half, and as many of its lower one.
        bool of_halves = false;
    };

    // Parts one below the other. A part that is packed in another way than the one before it starts
    // with a panel, and both hold integers.
    Packed(std::span<const Part> parts, int64_t cols);
    // As above, of a larger matrix. They begin with one of its panels.
    Packed(std::span<const Part> parts, int64_t cols, const Cut& cut);

    int64_t rows() const { return layout_.rows; }
    int64_t cols() const { return layout_.cols; }
    const Cut& cut() const { return cut_; }
    bool is_cut() const { return cut_.total_rows != rows(); }
    std::string name() const;  // of its packings
    int64_t num_bytes() const { return memory_.size(); }
    // All of it, as another matrix of the same name and shape may have it too.
    std::span<std::byte> bytes() { return {memory_.data(), static_cast<size_t>(memory_.size())}; }
    const cpu::Panels& panels() const { return layout_; }

    // Packs `num_rows` stored rows, in `data` one behind the other, as rows first_row …; row i of
    // them is stored row row_map[i], if there is a map. The codes and scales of a type go into its
    // packing as they are; f32, bf16, q8 and q4 take all other types too, and round or quantise
    // them. Throws ValueError when sizes or types do not agree.
    void pack(Team& team, int64_t first_row, std::span<const std::byte> data, StoredType type,
              int64_t num_rows, std::span<const int32_t> row_map);

    // The matrix [rows, cols].
    void unpack(float* to) const;

  private:
    cpu::Panels layout_;
    Cut cut_;
    Memory memory_;
};

}  // namespace octavo
