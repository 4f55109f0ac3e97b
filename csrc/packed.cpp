#include "packed.h"

#include <algorithm>
#include <string>

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

void pack_integers(Packing packing, const Piece& piece, const cpu::Kernels& kernels) {
    const cpu::Format& format = cpu::format_of(packing);
    const int64_t columns = format.block_columns();
    const bool as_is = packing_of(piece.type) == packing;
    float values[kChunkColumns + kGroupColumns];
    if (!as_is) {
        dequantize(piece.type, piece.stored, piece.count, values);
        // What fills the last group up must not move its scale.
        std::fill_n(values + piece.count, kGroupColumns, values[piece.count - 1]);
    }
    cpu::IntegerBlock block;
    for (int64_t i = 0; i < piece.count; i += columns) {
        if (as_is) {
            read_block(piece.type, piece.stored + i / columns * block_bytes(piece.type), &block);
        } else {
            block = kernels.quantize_group(packing, values + i);
        }
        cpu::put(format, piece.panel, (piece.first + i) / columns, piece.lane, block);
    }
}

// Numbers can be quantised to these; other forms hold what a file brings.
bool takes_numbers(Packing packing) {
    return !cpu::format_of(packing).is_integer() || packing == Packing::Q8 ||
           packing == Packing::Q4;
}

Panels layout_of(std::span<const Packed::Part> parts, int64_t cols) {
    check(!parts.empty(), "Packed: there are no parts");
    Panels panels{nullptr, 0, checked_side("cols", cols), {}, 0};
    int64_t offset = 0;
    for (const Packed::Part& part : parts) {
        const cpu::Format& format = cpu::format_of(part.packing);
        check(cols % format.block_columns() == 0 || !format.has_small(), "cols is ", cols, "; ",
              format.name, " needs a multiple of ", format.block_columns());
        const Packing last = panels.num_runs == 0
                                 ? part.packing
                                 : panels.runs[static_cast<size_t>(panels.num_runs - 1)].packing;
        if (panels.num_runs == 0 || part.packing != last) {
            check(panels.rows % kPanelRows == 0, "Packed: ", format.name, " from row ", panels.rows,
                  " on; another packing starts at a multiple of ", kPanelRows);
            check(panels.num_runs < cpu::kMaxRuns, "Packed: the packing changes more than ",
                  cpu::kMaxRuns - 1, " times");
            check(format.is_integer() == cpu::format_of(last).is_integer() &&
                      (format.is_integer() || panels.num_runs == 0),
                  "Packed: ", format.name, " beside ", cpu::format_of(last).name,
                  "; only integers can be mixed");
            const int64_t first_panel = panels.rows / kPanelRows;
            if (panels.num_runs > 0) {
                const cpu::PanelRun& before = panels.runs[static_cast<size_t>(panels.num_runs - 1)];
                offset += (first_panel - before.first_panel) * panels.panel_bytes(before.packing);
            }
            panels.runs[static_cast<size_t>(panels.num_runs)] = {first_panel, offset, part.packing};
            ++panels.num_runs;
        }
        panels.rows = checked_side("rows", panels.rows + checked_side("rows", part.rows));
    }
    return panels;
}

int64_t num_bytes_of(const Panels& panels) {
    const cpu::PanelRun& last = panels.runs[static_cast<size_t>(panels.num_runs - 1)];
    return last.offset + (panels.count() - last.first_panel) * panels.panel_bytes(last.packing);
}

}  // namespace

cpu::Packing parse_packing(std::string_view name) {
    std::string names;
    for (int i = 0; i < cpu::kNumPackings; ++i) {
        if (name == cpu::kFormats[i].name) {
            return static_cast<Packing>(i);
        }
        names += i == 0 ? "" : ", ";
        names += cpu::kFormats[i].name;
    }
    fail("dtype '", name, "' is not known; there are: ", names);
}

Packed::Packed(std::span<const Part> parts, int64_t cols)
    : layout_(layout_of(parts, cols)),
      cut_{0, layout_.rows, false},
      memory_(num_bytes_of(layout_)) {
    layout_.data = memory_.data();
}

Packed::Packed(std::span<const Part> parts, int64_t cols, const Cut& cut) : Packed(parts, cols) {
    const int64_t whole = cut.of_halves ? cut.total_rows / 2 : cut.total_rows;
    const int64_t own = cut.of_halves ? rows() / 2 : rows();
    check(cut.first_row >= 0 && cut.first_row % kPanelRows == 0, "Packed: first_row is ",
          cut.first_row, "; it must be a multiple of ", kPanelRows);
    check(whole < kMaxSide && cut.first_row <= whole && own <= whole - cut.first_row,
          "Packed: ", own, " rows from row ", cut.first_row, " on, of ", whole);
    check(!cut.of_halves ||
              (rows() % (2 * kPanelRows) == 0 && cut.total_rows % (2 * kPanelRows) == 0),
          "Packed: halves of ", rows(), " of ", cut.total_rows, " rows; they must be multiples of ",
          kPanelRows);
    cut_ = cut;
}

std::string Packed::name() const {
    std::string name;
    for (int i = 0; i < layout_.num_runs; ++i) {
        const cpu::PanelRun& run = layout_.runs[static_cast<size_t>(i)];
        name += i == 0 ? "" : "+";
        name += cpu::format_of(run.packing).name;
    }
    return name;
}

void Packed::pack(Team& team, int64_t first_row, std::span<const std::byte> data, StoredType type,
                  int64_t num_rows, std::span<const int32_t> row_map) {
    check(num_rows >= 0 && first_row >= 0 && first_row <= rows() && num_rows <= rows() - first_row,
          "pack: rows ", first_row, " to ", first_row + num_rows, " of a matrix of ", rows(),
          " rows");
    check(cols() % block_values(type) == 0, "pack: ", cols(),
          " columns, but this type stores blocks of ", block_values(type), " values");
    const int64_t row_bytes = cols() / block_values(type) * block_bytes(type);
    const auto num_bytes = static_cast<int64_t>(data.size());
    check(num_bytes == num_rows * row_bytes, "pack: data has ", num_bytes, " bytes, but ", num_rows,
          " rows of ", cols(), " columns take ", num_rows * row_bytes);
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
    for (int64_t p = first_panel; p < first_panel + num_panels; ++p) {
        const Packing packing = layout_.panel(p).packing;
        check(takes_numbers(packing) || packing_of(type) == packing,
              "pack: ", cpu::format_of(packing).name, " holds no ", name_of(type));
    }
    team.parallel_for(num_panels, [&](int64_t begin, int64_t end) {
        for (int64_t p = first_panel + begin; p < first_panel + end; ++p) {
            const auto [data_of_panel, packing] = layout_.panel(p);
            std::byte* panel = memory_.data() + (data_of_panel - memory_.data());
            const int64_t from = std::max(first_row, p * kPanelRows);
            const int64_t to = std::min(end_row, (p + 1) * kPanelRows);
            for (int64_t column = 0; column < cols(); column += kChunkColumns) {
                const int64_t count = std::min(kChunkColumns, cols() - column);
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
                    if (packing == Packing::F32) {
                        pack_floats(piece);
                    } else if (packing == Packing::BF16) {
                        pack_bf16(piece);
                    } else {
                        pack_integers(packing, piece, team.kernels());
                    }
                }
            }
        }
    });
}

void Packed::unpack(float* to) const {
    for (int64_t row = 0; row < rows(); ++row, to += cols()) {
        const auto [panel, packing] = layout_.panel(row / kPanelRows);
        const int64_t lane = row % kPanelRows;
        const cpu::Format& format = cpu::format_of(packing);
        for (int64_t c = 0; format.is_integer() && c < cols(); c += format.block_columns()) {
            float values[8 * kGroupColumns];
            cpu::expand(format, cpu::take(format, panel, c / format.block_columns(), lane), values);
            std::copy_n(values, std::min(format.block_columns(), cols() - c), to + c);
        }
        for (int64_t c = 0; !format.is_integer() && c < cols(); ++c) {
            to[c] = packing == Packing::F32
                        ? reinterpret_cast<const float*>(panel)[c * kPanelRows + lane]
                        : bf16_to_float(reinterpret_cast<const uint16_t*>(
                              panel)[(c / 2 * kPanelRows + lane) * 2 + c % 2]);
        }
    }
}

}  // namespace octavo
