#include "packed.h"

#include <algorithm>
#include <array>

#include "common/check.h"
#include "cpu/groups.h"

namespace octavo {

using cpu::kGroupColumns;
using cpu::kPanelRows;
using cpu::Packing;
using cpu::Panels;

namespace {

constexpr int64_t kMaxSide = int64_t{1} << 31;  // token ids and row numbers are int32
constexpr int64_t kChunkColumns = 256;          // whole blocks of every stored type

constexpr std::array<const char*, 4> kPackingNames{"f32", "bf16", "q8", "q4"};  // as enumerated

int64_t checked_side(const char* name, int64_t value) {
    check(value >= 1 && value < kMaxSide, name, " is ", value, "; it must be between 1 and ",
          kMaxSide - 1);
    return value;
}

// Some of a stored row's values, from column `first` on, and where they go.
struct Piece {
    const std::byte* stored;
    StoredType type;
    int64_t first;
    int64_t count;
    std::byte* panel;
    int64_t lane;
};

void pack_floats(const Piece& piece) {
    float values[kChunkColumns];
    dequantize(piece.type, piece.stored, piece.count, values);
    float* to = reinterpret_cast<float*>(piece.panel) + piece.first * kPanelRows + piece.lane;
    for (int64_t i = 0; i < piece.count; ++i) {
        to[i * kPanelRows] = values[i];
    }
}

void pack_bf16(const Piece& piece) {
    float values[kChunkColumns];
    dequantize(piece.type, piece.stored, piece.count, values);
    // `first` is even: whole pairs.
    auto* to = reinterpret_cast<uint16_t*>(piece.panel) + piece.first * kPanelRows + piece.lane * 2;
    for (int64_t i = 0; i < piece.count; ++i) {
        to[i / 2 * 2 * kPanelRows + i % 2] = float_to_bf16(values[i]);
    }
}

// Whether the packing can hold the type's own integers and scales.
bool holds(Packing packing, StoredType type) {
    return packing == Packing::Q8 ? type == StoredType::Q8_0
                                  : type == StoredType::Q4_0 || type == StoredType::Q4_1;
}

void pack_groups(const Panels& panels, const Piece& piece, const cpu::Kernels& kernels) {
    const bool as_is = holds(panels.packing, piece.type);
    float values[kChunkColumns + kGroupColumns];
    if (!as_is) {
        dequantize(piece.type, piece.stored, piece.count, values);
        // What fills the last group up must not move its scale.
        std::fill_n(values + piece.count, kGroupColumns, values[piece.count - 1]);
    }
    for (int64_t i = 0; i < piece.count; i += kGroupColumns) {
        std::byte* group = piece.panel + (piece.first + i) / kGroupColumns * panels.group_bytes();
        if (as_is) {
            const std::byte* block = piece.stored + i / kGroupColumns * block_bytes(piece.type);
            cpu::put(panels.packing, group, piece.lane, read_group(piece.type, block));
        } else {
            cpu::put(panels.packing, group, piece.lane,
                     kernels.quantize_group(panels.packing, values + i));
        }
    }
}

}  // namespace

cpu::Packing parse_packing(std::string_view name) {
    const auto found = std::find(kPackingNames.begin(), kPackingNames.end(), name);
    check(found != kPackingNames.end(), "dtype '", name,
          "' is not known; there are: f32, bf16, q8, q4");
    return static_cast<Packing>(found - kPackingNames.begin());
}

const char* name_of(cpu::Packing packing) { return kPackingNames[static_cast<size_t>(packing)]; }

Packed::Packed(int64_t rows, int64_t cols, Packing packing)
    : rows_(checked_side("rows", rows)),
      cols_(checked_side("cols", cols)),
      packing_(packing),
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
                    const Piece piece{data.data() + stored * row_bytes + offset,
                                      type,
                                      column,
                                      count,
                                      panel,
                                      row % kPanelRows};
                    switch (packing_) {
                        case Packing::F32:
                            pack_floats(piece);
                            break;
                        case Packing::BF16:
                            pack_bf16(piece);
                            break;
                        case Packing::Q8:
                        case Packing::Q4:
                            pack_groups(panels(), piece, team.kernels());
                            break;
                    }
                }
            }
        }
    });
}

void Packed::unpack(float* to) const {
    for (int64_t row = 0; row < rows_; ++row, to += cols_) {
        const std::byte* panel = memory_.data() + row / kPanelRows * panels().panel_bytes();
        const int64_t lane = row % kPanelRows;
        if (panels().is_quantized()) {
            for (int64_t c = 0; c < cols_; c += kGroupColumns) {
                float values[kGroupColumns];
                cpu::expand(
                    cpu::take(packing_, panel + c / kGroupColumns * panels().group_bytes(), lane),
                    values);
                std::copy_n(values, std::min(kGroupColumns, cols_ - c), to + c);
            }
            continue;
        }
        for (int64_t c = 0; c < cols_; ++c) {
            to[c] = packing_ == Packing::F32
                        ? reinterpret_cast<const float*>(panel)[c * kPanelRows + lane]
                        : bf16_to_float(reinterpret_cast<const uint16_t*>(
                              panel)[(c / 2 * kPanelRows + lane) * 2 + c % 2]);
        }
    }
}

}  // namespace octavo
