#include "adapters.h"

#include <algorithm>
#include <numeric>

#include "common/check.h"

namespace octavo {

using cpu::AdapterPanel;
using cpu::kPanelRows;

namespace {

constexpr int64_t kMaxSlots = 4096;

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// A matrix's row as row `lane` of a panel, from column `first` on: pairs of columns side by side in
// bf16, columns one behind the other in float32.
void put_row(std::byte* panel, Dtype dtype, int64_t lane, int64_t first, const float* values,
             int64_t count) {
    if (dtype == Dtype::F32) {
        float* to = reinterpret_cast<float*>(panel) + first * kPanelRows + lane;
        for (int64_t c = 0; c < count; ++c) {
            to[c * kPanelRows] = values[c];
        }
        return;
    }
    // Parts begin with an even rank, so a pair is whole or the last one.
    uint16_t* to = reinterpret_cast<uint16_t*>(panel) + (first / 2 * kPanelRows + lane) * 2;
    int64_t c = 0;
    for (; c + 1 < count; c += 2, to += 2 * kPanelRows) {
        to[0] = float_to_bf16(values[c]);
        to[1] = float_to_bf16(values[c + 1]);
    }
    if (c < count) {
        to[0] = float_to_bf16(values[c]);
    }
}

// Where a part's outputs and its ranks lie in the stacked layer.
struct Span {
    int64_t first_row;
    int64_t end_row;
    int64_t first_rank;
    int64_t end_rank;
    const AdapterPart* part;
};

std::vector<Span> spans_of(const AdapterSite& site, std::span<const AdapterPart> parts) {
    std::vector<Span> spans;
    int64_t rank = 0;
    for (const AdapterPart& part : parts) {
        const auto before = site.sizes.begin() + part.part;
        const int64_t row = std::accumulate(site.sizes.begin(), before, int64_t{0});
        const int64_t end_rank = rank + round_up(part.down.rows, 2);
        spans.push_back({row, row + *before, rank, end_rank, &part});
        rank = end_rank;
    }
    return spans;
}

// From which ranks the panel that begins with this output is added to.
AdapterPanel panel_of(const std::vector<Span>& spans, int64_t row) {
    AdapterPanel panel{0, 0, 0};
    int64_t end = 0;
    for (const Span& span : spans) {
        if (span.first_row < row + kPanelRows && span.end_row > row) {
            panel.first = end == 0 ? static_cast<int32_t>(span.first_rank) : panel.first;
            end = span.end_rank;
        }
    }
    panel.pairs = static_cast<int32_t>(end == 0 ? 0 : (end - panel.first) / 2);
    return panel;
}

}  // namespace

int64_t AdapterSite::rows() const {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

int64_t AdapterSite::own_rows() const {
    int64_t count = 0;
    for (const OutputRange& range : own) {
        count += range.rows();
    }
    return count;
}

AdapterSlots::AdapterSlots(int64_t num_slots, int64_t max_rank, Dtype dtype)
    : max_rank_(max_rank), dtype_(dtype) {
    check(num_slots >= 1 && num_slots <= kMaxSlots, "AdapterSlots: ", num_slots,
          " slots; there must be from 1 to ", kMaxSlots);
    check(max_rank >= 1 && max_rank <= cpu::kMaxAdapterRank, "AdapterSlots: max_rank is ", max_rank,
          "; it must be from 1 to ", cpu::kMaxAdapterRank);
    held_.resize(static_cast<size_t>(num_slots));
}

int64_t AdapterSlots::add_site(std::vector<int64_t> sizes, int64_t cols,
                               std::vector<OutputRange> own) {
    check(!sizes.empty() && *std::min_element(sizes.begin(), sizes.end()) >= 1 && cols >= 1,
          "add_site: sizes and cols must be above 0");
    AdapterSite site{std::move(sizes), cols, std::move(own)};
    int64_t before = 0;
    for (const OutputRange& range : site.own) {
        check(range.first >= before && range.first % kPanelRows == 0 && before % kPanelRows == 0 &&
                  range.rows() >= 1 && range.end <= site.rows(),
              "add_site: outputs ", range.first, " to ", range.end, " of ", site.rows(),
              " are not whole panels of the layer, or out of order");
        before = range.end;
    }
    sites_.push_back(std::move(site));
    weights_.emplace_back(held_.size(), nullptr);
    return num_sites() - 1;
}

const AdapterSite& AdapterSlots::site(int64_t index) const {
    check(index >= 0 && index < num_sites(), "there is no adapter site ", index, "; ", num_sites(),
          " were added");
    return sites_[static_cast<size_t>(index)];
}

int64_t AdapterSlots::shrunken_cols(int64_t index) const {
    const auto num_parts = static_cast<int64_t>(site(index).sizes.size());
    return round_up(num_parts * round_up(max_rank_, 2), kPanelRows);
}

const cpu::AdapterWeights* const* AdapterSlots::of_site(int64_t index) const {
    (void)site(index);
    return weights_[static_cast<size_t>(index)].data();
}

void AdapterSlots::set(int64_t slot, std::shared_ptr<const PackedAdapter> adapter) {
    check(slot >= 0 && slot < num_slots(), "set: there is no slot ", slot, "; there are ",
          num_slots());
    check(adapter == nullptr || adapter->num_sites() == num_sites(),
          "set: the adapter was packed for other sites");
    for (int64_t i = 0; i < num_sites(); ++i) {
        weights_[static_cast<size_t>(i)][static_cast<size_t>(slot)] =
            adapter == nullptr ? nullptr : adapter->of_site(i);
    }
    held_[static_cast<size_t>(slot)] = std::move(adapter);
}

PackedAdapter::PackedAdapter(const AdapterSlots& slots) {
    layers_.resize(static_cast<size_t>(slots.num_sites()));
}

void PackedAdapter::add(const AdapterSlots& slots, int64_t index,
                        std::span<const AdapterPart> parts) {
    const AdapterSite& site = slots.site(index);
    check(num_sites() == slots.num_sites(), "add: the adapter was made for other sites");
    int64_t before = -1;
    for (const AdapterPart& part : parts) {
        check(part.part > before && part.part < static_cast<int64_t>(site.sizes.size()),
              "add: part ", part.part, " of site ", index, " is not there, or out of order");
        before = part.part;
        const int64_t rank = part.down.rows;
        check(rank >= 1 && rank <= slots.max_rank(), "add: rank ", rank, "; it must be from 1 to ",
              slots.max_rank());
        check(part.down.cols == site.cols && part.up.cols == rank &&
                  part.up.rows == site.sizes[static_cast<size_t>(part.part)],
              "add: down of ", part.down.rows, " x ", part.down.cols, " and up of ", part.up.rows,
              " x ", part.up.cols, " do not fit part ", part.part, " of site ", index);
    }
    check(!parts.empty() && layers_[static_cast<size_t>(index)] == nullptr,
          "add: nothing to add, or added before");
    if (site.own.empty()) {
        return;
    }
    const std::vector<Span> spans = spans_of(site, parts);
    const Dtype dtype = slots.dtype();
    const int64_t num_ranks = round_up(spans.back().end_rank, kPanelRows);
    const int64_t down_panel = round_up(site.cols, 2) * kPanelRows * size_of(dtype);
    const int64_t down_bytes = num_ranks / kPanelRows * down_panel;

    auto layer = std::make_unique<Layer>();
    int64_t up_bytes = 0;
    for (const OutputRange& range : site.own) {
        for (int64_t row = range.first; row < range.end; row += kPanelRows) {
            AdapterPanel panel = panel_of(spans, row);
            panel.offset = down_bytes + up_bytes;
            up_bytes += panel.pairs * 2 * kPanelRows * size_of(dtype);
            layer->panels.push_back(panel);
        }
    }
    layer->memory = Memory(down_bytes + up_bytes);
    layer->scales.assign(static_cast<size_t>(num_ranks), 0.0F);
    std::byte* to = layer->memory.data();
    for (const Span& span : spans) {
        const auto& [part, down, up, scale] = *span.part;
        for (int64_t r = 0; r < down.rows; ++r) {
            const int64_t rank = span.first_rank + r;
            layer->scales[static_cast<size_t>(rank)] = scale;
            std::byte* panel = to + rank / kPanelRows * down_panel;
            put_row(panel, dtype, rank % kPanelRows, 0, down.data + r * down.cols, down.cols);
        }
        int64_t panels_before = 0;  // of the ranges before
        for (const OutputRange& range : site.own) {
            const int64_t end = std::min(range.end, span.end_row);
            for (int64_t row = std::max(range.first, span.first_row); row < end; ++row) {
                const int64_t index = panels_before + (row - range.first) / kPanelRows;
                const AdapterPanel& panel = layer->panels[static_cast<size_t>(index)];
                put_row(to + panel.offset, dtype, row % kPanelRows, span.first_rank - panel.first,
                        up.data + (row - span.first_row) * up.cols, up.cols);
            }
            panels_before += (range.rows() + kPanelRows - 1) / kPanelRows;
        }
    }
    layer->weights = {dtype, num_ranks, down_panel, to, layer->panels.data(), layer->scales.data()};
    num_bytes_ += layer->memory.size();
    layers_[static_cast<size_t>(index)] = std::move(layer);
}

}  // namespace octavo
