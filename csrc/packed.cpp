#include "packed.h"

#include <algorithm>

#include "common/check.h"

namespace octavo {

using cpu::kPanelRows;

namespace {

constexpr int64_t kMaxSide = int64_t{1} << 31;  // token ids and row numbers are int32
constexpr int64_t kChunkColumns = 256;          // whole blocks of every stored type

int64_t checked_side(const char* name, int64_t value) {
    check(value >= 1 && value < kMaxSide, name, " is ", value, "; it must be between 1 and ",
          kMaxSide - 1);
    return value;
}

// One row's values from column `first` on, `stride` being that of its panel.
void scatter(std::byte* panel, Dtype dtype, int64_t lane, int64_t first, int64_t count,
             const float* from) {
    if (dtype == Dtype::F32) {
        auto* to = reinterpret_cast<float*>(panel) + first * kPanelRows + lane;
        for (int64_t i = 0; i < count; ++i) {
            to[i * kPanelRows] = from[i];
        }
        return;
    }
    auto* to = reinterpret_cast<uint16_t*>(panel) + first * kPanelRows + lane * 2;  // first is even
    for (int64_t i = 0; i < count; ++i) {
        to[i / 2 * 2 * kPanelRows + i % 2] = float_to_bf16(from[i]);
    }
}

}  // namespace

Packed::Packed(int64_t rows, int64_t cols, Dtype dtype)
    : rows_(checked_side("rows", rows)),
      cols_(checked_side("cols", cols)),
      dtype_(dtype),
      memory_(panels().count() * panels().panel_bytes()) {}

void Packed::pack(Team& team, int64_t first_row, std::span<const std::byte> data, StoredType type,
                  int64_t num_rows, std::span<const int32_t> row_map) {
    check(num_rows >= 0 && first_row >= 0 && first_row <= rows_ && num_rows <= rows_ - first_row,
          "pack: rows ", first_row, " to ", first_row + num_rows, " of a matrix of ", rows_,
          " rows");
    check(cols_ % block_values(type) == 0, "pack: ", cols_,
          " columns, but this type stores blocks of ", block_values(type), " values");
    const int64_t row_bytes = cols_ / block_values(type) * block_bytes(type);
    const auto num_bytes = static_cast<int64_t>(data.size());
    check(num_bytes == num_rows * row_bytes, "pack: data has ", num_bytes, " bytes, but ", num_rows,
          " rows of ", cols_, " columns take ", num_rows * row_bytes);
    check(row_map.empty() || static_cast<int64_t>(row_map.size()) == num_rows, "pack: row_map has ",
          row_map.size(), " entries for ", num_rows, " rows");
    for (const int32_t row : row_map) {
        check(row >= 0 && row < num_rows, "pack: row_map names stored row ", row, " of ", num_rows);
    }
    if (num_rows == 0) {
        return;
    }
    const int64_t end_row = first_row + num_rows;
    const int64_t first_panel = first_row / kPanelRows;
    const int64_t num_panels = (end_row - 1) / kPanelRows + 1 - first_panel;
    team.parallel_for(num_panels, [&](int64_t begin, int64_t end) {
        float values[kChunkColumns];
        for (int64_t p = first_panel + begin; p < first_panel + end; ++p) {
            std::byte* panel = memory_.data() + p * panels().panel_bytes();
            const int64_t from = std::max(first_row, p * kPanelRows);
            const int64_t to = std::min(end_row, (p + 1) * kPanelRows);
            for (int64_t column = 0; column < cols_; column += kChunkColumns) {
                const int64_t count = std::min(kChunkColumns, cols_ - column);
                const int64_t offset = column / block_values(type) * block_bytes(type);
                for (int64_t row = from; row < to; ++row) {
                    const int64_t index = row - first_row;
                    const int64_t stored =
                        row_map.empty() ? index : row_map[static_cast<size_t>(index)];
                    dequantize(type, data.data() + stored * row_bytes + offset, count, values);
                    scatter(panel, dtype_, row % kPanelRows, column, count, values);
                }
            }
        }
    });
}

void Packed::unpack(float* to) const {
    for (int64_t row = 0; row < rows_; ++row) {
        const std::byte* panel = memory_.data() + row / kPanelRows * panels().panel_bytes();
        const int64_t lane = row % kPanelRows;
        for (int64_t c = 0; c < cols_; ++c) {
            to[row * cols_ + c] = dtype_ == Dtype::F32
                                      ? reinterpret_cast<const float*>(panel)[c * kPanelRows + lane]
                                      : bf16_to_float(reinterpret_cast<const uint16_t*>(
                                            panel)[(c / 2 * kPanelRows + lane) * 2 + c % 2]);
        }
    }
}

}  // namespace octavo
