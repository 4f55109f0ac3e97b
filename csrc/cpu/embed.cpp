#include "cpu/embed.h"

#include <algorithm>

#include "cpu/groups.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

void embed_integers(Panel panel, int64_t cols, int64_t lane, float scale, float* to) {
    const Format& format = format_of(panel.packing);
    for (int64_t first = 0; first < cols; first += format.block_columns()) {
        float values[8 * kGroupColumns];
        expand(format, take(format, panel.data, first / format.block_columns(), lane), values);
        const int64_t count = std::min(format.block_columns(), cols - first);
        for (int64_t i = 0; i < count; ++i) {
            to[first + i] = values[i] * scale;
        }
    }
}

}  // namespace

// Gathered from the panels, so that a table that is also the head need not exist twice.
void embed(const EmbedArgs& args, int64_t begin, int64_t end) {
    const Panels& table = args.table;
    for (int64_t r = begin; r < end; ++r) {
        const int64_t id = (args.ids == nullptr ? 0 : args.ids[r]) + args.offset;
        const int64_t lane = id % kPanelRows;
        const Panel panel = table.panel(id / kPanelRows);
        auto* to = reinterpret_cast<float*>(args.dst.row(r));
        if (table.is_quantized()) {
            embed_integers(panel, table.cols, lane, args.scale, to);
        } else if (panel.packing == Packing::F32) {
            const auto* values = reinterpret_cast<const float*>(panel.data);
            for (int64_t c = 0; c < table.cols; ++c) {
                to[c] = values[c * kPanelRows + lane] * args.scale;
            }
        } else {
            const auto* values = reinterpret_cast<const uint16_t*>(panel.data);
            for (int64_t c = 0; c < table.cols; ++c) {
                const int64_t at = (c / 2 * kPanelRows + lane) * 2 + c % 2;
                to[c] = bf16_to_float(values[at]) * args.scale;
            }
        }
    }
}

}  // namespace octavo::cpu::OCTAVO_ISA
