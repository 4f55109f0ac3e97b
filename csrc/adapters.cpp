#include "adapters.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "common/check.h"
#include "common/half.h"

namespace octavo {

using cpu::AdapterRun;
using cpu::kPanelRows;

namespace {

constexpr int64_t kMaxSlots = 4096;

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

template <class T>
T load(const std::byte* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// How numbers of a file are read.
struct FromF32 {
    static constexpr int64_t kBytes = 4;
    static float number(const std::byte* from) { return load<float>(from); }
    static uint16_t bf16(const std::byte* from) { return float_to_bf16(number(from)); }
};

struct FromF16 {
    static constexpr int64_t kBytes = 2;
    static float number(const std::byte* from) { return half_to_float(load<uint16_t>(from)); }
    static uint16_t bf16(const std::byte* from) { return float_to_bf16(number(from)); }
};

struct FromBf16 {
    static constexpr int64_t kBytes = 2;
    static float number(const std::byte* from) { return bf16_to_float(load<uint16_t>(from)); }
    static uint16_t bf16(const std::byte* from) { return load<uint16_t>(from); }
};

// Rows of a matrix as rows of a panel from `lane` on, from column `first` on: pairs of columns side
// by side in bf16, columns one behind the other in float32. Column by column, so that what is
// written lies together.
template <class From>
void put_rows_from(std::byte* panel, Dtype dtype, int64_t lane, int64_t first,
                   const StoredMatrix& rows) {
    const int64_t row_bytes = rows.cols * From::kBytes;
    if (dtype == Dtype::F32) {
        float* to = reinterpret_cast<float*>(panel) + first * kPanelRows + lane;
        const std::byte* from = rows.data;
        for (int64_t c = 0; c < rows.cols; ++c, to += kPanelRows, from += From::kBytes) {
            for (int64_t r = 0; r < rows.rows; ++r) {
                to[r] = From::number(from + r * row_bytes);
            }
        }
        return;
    }
    // Parts begin with an even rank, so a pair is whole or the last one.
    uint16_t* to = reinterpret_cast<uint16_t*>(panel) + (first / 2 * kPanelRows + lane) * 2;
    const std::byte* from = rows.data;
    int64_t c = 0;
    for (; c + 1 < rows.cols; c += 2, to += 2 * kPanelRows, from += 2 * From::kBytes) {
        for (int64_t r = 0; r < rows.rows; ++r) {
            to[2 * r] = From::bf16(from + r * row_bytes);
            to[2 * r + 1] = From::bf16(from + r * row_bytes + From::kBytes);
        }
    }
    for (int64_t r = 0; c < rows.cols && r < rows.rows; ++r) {
        to[2 * r] = From::bf16(from + r * row_bytes);
    }
}

void put_rows(std::byte* panel, Dtype dtype, int64_t lane, int64_t first,
              const StoredMatrix& rows) {
    switch (rows.dtype) {
        case StoredDtype::F32:
            return put_rows_from<FromF32>(panel, dtype, lane, first, rows);
        case StoredDtype::F16:
            return put_rows_from<FromF16>(panel, dtype, lane, first, rows);
        case StoredDtype::BF16:
            return put_rows_from<FromBf16>(panel, dtype, lane, first, rows);
    }
}

StoredMatrix rows_of(const StoredMatrix& matrix, int64_t first, int64_t count) {
    const int64_t row_bytes = matrix.cols * size_of(matrix.dtype);
    return {matrix.data + first * row_bytes, matrix.dtype, count, matrix.cols};
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
struct Ranks {
    int64_t first;
    int64_t end;

    bool operator==(const Ranks&) const = default;
    int64_t pairs() const { return (end - first) / 2; }
};

Ranks ranks_of(const std::vector<Span>& spans, int64_t row) {
    Ranks ranks{0, 0};
    for (const Span& span : spans) {
        if (span.first_row < row + kPanelRows && span.end_row > row) {
            ranks.first = ranks.end == 0 ? span.first_rank : ranks.first;
            ranks.end = span.end_rank;
        }
    }
    return ranks;
}

// Throws ValueError where shapes do not agree.
void check_fit(const AdapterSlots& slots, const AdapterAddition& addition) {
    const AdapterSite& site = slots.site(addition.site);
    check(!addition.parts.empty(), "PackedAdapter: nothing for site ", addition.site);
    int64_t before = -1;
    for (const AdapterPart& part : addition.parts) {
        check(part.part > before && part.part < static_cast<int64_t>(site.sizes.size()),
              "PackedAdapter: part ", part.part, " of site ", addition.site,
              " is not there, or out of order");
        before = part.part;
        const int64_t rank = part.down.rows;
        check(rank >= 1 && rank <= slots.max_rank(), "PackedAdapter: rank ", rank,
              "; it must be from 1 to ", slots.max_rank());
        check(part.down.cols == site.cols && part.up.cols == rank &&
                  part.up.rows == site.sizes[static_cast<size_t>(part.part)],
              "PackedAdapter: down of ", part.down.rows, " x ", part.down.cols, " and up of ",
              part.up.rows, " x ", part.up.cols, " do not fit part ", part.part, " of site ",
              addition.site);
    }
}

}  // namespace

bool SpareMemory::fits(int64_t num_bytes) const {
    // One that is much larger would be held by a small adapter.
    return memory_.size() >= num_bytes && memory_.size() / 2 <= num_bytes;
}

Memory SpareMemory::take(int64_t num_bytes) {
    Memory found;
    {
        const std::scoped_lock lock(mutex_);
        if (fits(num_bytes)) {
            found = std::exchange(memory_, Memory());
        }
    }
    if (found.size() == 0) {
        return Memory(num_bytes);
    }
    std::memset(found.data(), 0, static_cast<size_t>(num_bytes));
    return found;
}

void SpareMemory::give(Memory memory) {
    const std::scoped_lock lock(mutex_);
    if (memory.size() > memory_.size()) {
        std::swap(memory_, memory);
    }
}

void SpareMemory::prepare(int64_t num_bytes) {
    constexpr int64_t kPageBytes = 4096;
    {
        const std::scoped_lock lock(mutex_);
        if (fits(num_bytes)) {
            return;
        }
    }
    Memory memory(num_bytes);
    for (int64_t at = 0; at < num_bytes; at += kPageBytes) {
        // Zero is there already; the page is not.
        reinterpret_cast<volatile std::byte*>(memory.data())[at] = std::byte{0};
    }
    const std::scoped_lock lock(mutex_);
    std::swap(memory_, memory);
}

int64_t SpareMemory::num_bytes() const {
    const std::scoped_lock lock(mutex_);
    return memory_.size();
}

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

PackedAdapter::PackedAdapter(const AdapterSlots& slots, std::span<const AdapterAddition> added)
    : spare_(slots.spare()) {
    layers_.resize(static_cast<size_t>(slots.num_sites()));
    for (const AdapterAddition& addition : added) {
        check_fit(slots, addition);
        auto& layer = layers_[static_cast<size_t>(addition.site)];
        check(layer == nullptr, "PackedAdapter: site ", addition.site, " is there twice");
        if (!slots.site(addition.site).own.empty()) {
            layer = std::make_unique<Layer>(place(slots, addition, num_bytes_));
        }
    }
    memory_ = spare_->take(num_bytes_);  // in one piece, so that it has large pages
    for (const AdapterAddition& addition : added) {
        if (Layer* layer = layers_[static_cast<size_t>(addition.site)].get()) {
            fill(slots.site(addition.site), addition, *layer);
        }
    }
}

PackedAdapter::~PackedAdapter() { spare_->give(std::move(memory_)); }

// Where an addition's numbers go, behind `num_bytes` of others; these grow by it.
PackedAdapter::Layer PackedAdapter::place(const AdapterSlots& slots,
                                          const AdapterAddition& addition, int64_t& num_bytes) {
    const AdapterSite& site = slots.site(addition.site);
    const std::vector<Span> spans = spans_of(site, addition.parts);
    const Dtype dtype = slots.dtype();
    const int64_t num_ranks = round_up(spans.back().end_rank, kPanelRows);
    const int64_t down_panel = round_up(site.cols, 2) * kPanelRows * size_of(dtype);
    Layer layer{};
    layer.first_byte = num_bytes;
    int64_t bytes = num_ranks / kPanelRows * down_panel;
    Ranks before{-1, -1};
    int64_t panel = 0;
    for (const OutputRange& range : site.own) {
        for (int64_t row = range.first; row < range.end; row += kPanelRows) {
            const Ranks ranks = ranks_of(spans, row);
            const int64_t panel_bytes = ranks.pairs() * 2 * kPanelRows * size_of(dtype);
            if (ranks != before) {
                layer.runs.push_back({panel, bytes - panel * panel_bytes,
                                      static_cast<int32_t>(ranks.first),
                                      static_cast<int32_t>(ranks.pairs())});
                before = ranks;
            }
            layer.runs.back().end = ++panel;
            bytes += panel_bytes;
        }
    }
    layer.scales.assign(static_cast<size_t>(num_ranks), 0.0F);
    layer.weights.dtype = dtype;
    layer.weights.num_ranks = num_ranks;
    layer.weights.down_panel_bytes = down_panel;
    num_bytes += bytes;
    return layer;
}

void PackedAdapter::fill(const AdapterSite& site, const AdapterAddition& addition, Layer& layer) {
    cpu::AdapterWeights& weights = layer.weights;
    std::byte* to = memory_.data() + layer.first_byte;
    for (const Span& span : spans_of(site, addition.parts)) {
        const auto& [part, down, up, scale] = *span.part;
        std::fill_n(layer.scales.begin() + span.first_rank, down.rows, scale);
        for (int64_t r = 0; r < down.rows;) {
            const int64_t rank = span.first_rank + r;
            const int64_t lane = rank % kPanelRows;
            const int64_t count = std::min(down.rows - r, kPanelRows - lane);
            put_rows(to + rank / kPanelRows * weights.down_panel_bytes, weights.dtype, lane, 0,
                     rows_of(down, r, count));
            r += count;
        }
        int64_t panels_before = 0;  // of the ranges before
        const AdapterRun* run = layer.runs.data();
        for (const OutputRange& range : site.own) {
            const int64_t end = std::min(range.end, span.end_row);
            for (int64_t row = std::max(range.first, span.first_row); row < end;) {
                const int64_t lane = row % kPanelRows;
                const int64_t count = std::min(end - row, kPanelRows - lane);
                const int64_t panel = panels_before + (row - range.first) / kPanelRows;
                while (run->end <= panel) {
                    ++run;
                }
                const int64_t bytes = run->pairs * 2 * kPanelRows * size_of(weights.dtype);
                put_rows(to + run->offset + panel * bytes, weights.dtype, lane,
                         span.first_rank - run->first, rows_of(up, row - span.first_row, count));
                row += count;
            }
            panels_before += (range.rows() + kPanelRows - 1) / kPanelRows;
        }
    }
    weights.data = to;
    weights.runs = layer.runs.data();
    weights.scales = layer.scales.data();
}

}  // namespace octavo
