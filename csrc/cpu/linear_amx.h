// Linear layers in bf16 with AMX: tiles of up to 16 rows times 16 outputs, 32 columns at a time.
//
// A panel is what the processor wants of a tile of weights as it lies in memory. Each 32 columns'
// products are summed by the processor, the even and the odd ones apart, and then added to what is
// there: an order of its own, but the same for each row, whatever other rows are in the batch. So
// one row is computed this way too; its tile is one row high, and memory is the limit.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/adapters.h"
#include "cpu/linear_finish.h"
#include "cpu/tiles.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

constexpr int64_t kTileColumns = 32;  // of bf16

// A block of rows should fit the second cache, which is large where there are tiles; and it should
// be high, for the third one brings panels slower than they are multiplied.
constexpr int64_t kTiledBlockBytes = 1024 * 1024;
constexpr int64_t kMaxTiledRows = 512;
constexpr int64_t kMinTiledRows = 2 * kTileHeight;

// Some columns of one or two panels, and of one or two tiles of rows.
struct TileOperands {
    const std::byte* x[2];
    int64_t x_stride;
    const std::byte* panel[2];
};

// Tile numbers are part of the instructions, hence written out.
template <bool kTwoHigh, bool kTwoWide>
OCTAVO_INLINE void multiply_tiles(const TileOperands& from, int64_t step) {
    _tile_loadd(4, from.x[0] + step * kTileRowBytes, from.x_stride);
    _tile_loadd(6, from.panel[0] + step * kTileBytes, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoWide) {
        _tile_loadd(7, from.panel[1] + step * kTileBytes, kTileRowBytes);
        _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwoHigh) {
        _tile_loadd(5, from.x[1] + step * kTileRowBytes, from.x_stride);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kTwoWide) {
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

class AmxLinear {
  public:
    AmxLinear(const LinearArgs& args, std::byte* scratch)
        : args_(args),
          scratch_(scratch),
          whole_steps_(args.weight.pairs() * 2 / kTileColumns),
          tail_pairs_(args.weight.pairs() % (kTileColumns / 2)) {}

    // Rows that go together.
    static int64_t block_rows(const Panels& weight) {
        const int64_t fitting = kTiledBlockBytes / row_bytes(weight);
        return std::clamp(fitting / kMinTiledRows * kMinTiledRows, kMinTiledRows, kMaxTiledRows);
    }

    // Of padded rows.
    static int64_t scratch_bytes(const Panels& weight) {
        return block_rows(weight) * row_bytes(weight);
    }

    void run(int64_t begin, int64_t end) {
        const int64_t block_rows = AmxLinear::block_rows(args_.weight);
        for (first_row_ = 0; first_row_ < args_.num_rows; first_row_ += block_rows) {
            num_rows_ = std::min(block_rows, args_.num_rows - first_row_);
            prepare_rows();
            const int64_t num_tiles = (num_rows_ + kTileHeight - 1) / kTileHeight;
            height_ = (num_rows_ + num_tiles - 1) / num_tiles;
            configure();
            const bool is_glu = args_.mode == LinearMode::Glu;
            for (int64_t unit = begin; unit < end; unit += is_glu ? 1 : 2) {
                if (is_glu) {
                    sweep<true>(unit, args_.units() + unit);
                } else if (unit + 1 < end) {
                    sweep<true>(unit, unit + 1);
                } else {
                    sweep<false>(unit, unit);
                }
            }
        }
        _tile_release();
    }

  private:
    // Tiles 0 … 3 are sums and 4, 5 rows of x, all of one height; 6 and 7 are weights.
    void configure() const {
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) {
            config.set(tile, tile < 6 ? height_ : kTileHeight, kTileRowBytes);
        }
        config.load();
    }

    // Of one padded row.
    static int64_t row_bytes(const Panels& weight) {
        return (weight.cols + kTileColumns - 1) / kTileColumns * kTileRowBytes;
    }

    // Rows as they are, or with zeros up to whole steps.
    void prepare_rows() {
        if (args_.src.cols % kTileColumns == 0) {
            x_ = args_.src.row(first_row_);
            x_stride_ = args_.src.row(1) - args_.src.row(0);
            return;
        }
        x_ = scratch_;
        x_stride_ = row_bytes(args_.weight);
        for (int64_t r = 0; r < num_rows_; ++r) {
            std::byte* to = scratch_ + r * x_stride_;
            std::memcpy(to, args_.src.row(first_row_ + r), static_cast<size_t>(args_.src.cols * 2));
            std::memset(to + args_.src.cols * 2, 0,
                        static_cast<size_t>(x_stride_ - args_.src.cols * 2));
        }
    }

    // All rows of the block times one or two panels.
    template <bool kTwoWide>
    void sweep(int64_t first_panel, int64_t second_panel) {
        const int64_t panels[2] = {first_panel, second_panel};
        for (int i = 0; i < (kTwoWide ? 2 : 1); ++i) {
            panel_[i] = args_.weight.panel(panels[i]).data;
            if (tail_pairs_ != 0) {  // behind a panel is another one, or nothing
                std::memset(tail_[i], 0, kTileBytes);
                std::memcpy(tail_[i], panel_[i] + whole_steps_ * kTileBytes,
                            static_cast<size_t>(tail_pairs_ * kTileRowBytes));
            }
        }
        for (int64_t r = 0; r < num_rows_; r += 2 * height_) {
            if (r + height_ < num_rows_) {
                multiply<true, kTwoWide>(r);
                finish_tile<kTwoWide>(r, 0, first_panel, second_panel);
                finish_tile<kTwoWide>(r + height_, 1, first_panel, second_panel);
            } else {
                multiply<false, kTwoWide>(r);
                finish_tile<kTwoWide>(r, 0, first_panel, second_panel);
            }
        }
    }

    // The last tile is as high as the others: it may take up rows of the one before once more.
    int64_t start_of(int64_t row) const { return std::min(row, num_rows_ - height_); }

    template <bool kTwoHigh, bool kTwoWide>
    void multiply(int64_t row) {
        TileOperands from{};
        from.x[0] = x_ + start_of(row) * x_stride_;
        from.x[1] = kTwoHigh ? x_ + start_of(row + height_) * x_stride_ : nullptr;
        from.x_stride = x_stride_;
        from.panel[0] = panel_[0];
        from.panel[1] = panel_[1];
        written(x_);
        written(tail_);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = 0; step < whole_steps_; ++step) {
            if constexpr (!kTwoHigh) {  // with few rows, memory is the limit
                for (int64_t line = 0; line < kTileBytes; line += 64) {
                    prefetch(panel_[0] + (step + 1) * kTileBytes + line);
                    prefetch(panel_[kTwoWide ? 1 : 0] + (step + 1) * kTileBytes + line);
                }
            }
            multiply_tiles<kTwoHigh, kTwoWide>(from, step);
        }
        if (tail_pairs_ != 0) {
            from.x[0] += whole_steps_ * kTileRowBytes;
            from.x[1] = kTwoHigh ? from.x[1] + whole_steps_ * kTileRowBytes : nullptr;
            from.panel[0] = tail_[0];
            from.panel[1] = tail_[1];
            multiply_tiles<kTwoHigh, kTwoWide>(from, 0);
        }
        _tile_stored(0, y_[0][0], kTileRowBytes);
        if constexpr (kTwoWide) {
            _tile_stored(1, y_[0][1], kTileRowBytes);
        }
        if constexpr (kTwoHigh) {
            _tile_stored(2, y_[1][0], kTileRowBytes);
            if constexpr (kTwoWide) {
                _tile_stored(3, y_[1][1], kTileRowBytes);
            }
        }
    }

    template <bool kTwoWide>
    void finish_tile(int64_t row, int index, int64_t first_panel, int64_t second_panel) {
        const int64_t start = start_of(row);
        const int64_t count = std::min(height_, num_rows_ - row);
        const int64_t skipped = (row - start) * kLanes;
        if (args_.slots != nullptr) {
            const int64_t panels[2] = {first_panel, second_panel};
            for (int i = 0; i < (kTwoWide ? 2 : 1); ++i) {
                add_delta(args_, first_row_ + row, count, panels[i], 1, y_[index][i] + skipped,
                          kLanes);
            }
        }
        const Sums16 left{y_[index][0] + skipped, kLanes};
        const Sums16 right{y_[index][1] + skipped, kLanes};
        finish(args_, first_row_ + row, count, first_panel, left, right);
        if (kTwoWide && args_.mode != LinearMode::Glu) {
            finish(args_, first_row_ + row, count, second_panel, right);
        }
    }

    const LinearArgs& args_;
    std::byte* const scratch_;
    const int64_t whole_steps_;
    const int64_t tail_pairs_;
    int64_t first_row_ = 0;  // of the block under way
    int64_t num_rows_ = 0;
    int64_t height_ = 0;  // of its tiles
    const std::byte* x_ = nullptr;
    int64_t x_stride_ = 0;
    const std::byte* panel_[2] = {};
    alignas(64) std::byte tail_[2][kTileBytes] = {};
    alignas(64) float y_[2][2][kTileHeight * kLanes] = {};  // [tile of rows][panel]
};

}  // namespace
}  // namespace octavo::cpu::OCTAVO_ISA
