#include "cpu/linear.h"

#include <algorithm>

#include "cpu/adapters.h"
#include "cpu/dot.h"
#include "cpu/linear_finish.h"
#include "cpu/linear_quantized.h"
#include "cpu/rows.h"
#ifdef __AMX_BF16__
#include "cpu/linear_amx.h"
#endif

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// A block of source rows is brought into the dot kernel's form once and then meets every panel; a
// panel stays in the first cache while all the block's rows sweep it. The block should fit the
// second one.
constexpr int64_t kBlockBytes = 256 * 1024;
constexpr int64_t kMaxBlockRows = 96;
constexpr int64_t kMinBlockRows = 24;
static_assert(kMaxBlockRows % kTileRows == 0 && kMinBlockRows % kTileRows == 0);

// Ahead in the panels of a tile that are read once: the hardware does not look beyond a page.
constexpr int64_t kPrefetchBytes = 8192;

int64_t block_rows(const Panels& weight) {
    const int64_t fitting = kBlockBytes / (weight.pairs() * 2 * 4) / kTileRows * kTileRows;
    return std::clamp(fitting, kMinBlockRows, kMaxBlockRows);
}

template <class Weights, class Rows>
class Linear {
  public:
    Linear(const LinearArgs& args, std::byte* scratch) : args_(args), scratch_(scratch) {}

    void run(int64_t begin, int64_t end) {
        const int64_t step = block_rows(args_.weight);
        for (first_row_ = 0; first_row_ < args_.num_rows; first_row_ += step) {
            num_rows_ = std::min(step, args_.num_rows - first_row_);
            prepare_rows();
            // Tiles of even height; low ones take several panels, so that enough chains are in
            // flight.
            const int64_t num_tiles = (num_rows_ + kTileRows - 1) / kTileRows;
            tile_rows_ = (num_rows_ + num_tiles - 1) / num_tiles;
            int64_t width = max_panels(tile_rows_);
            fetch_deltas(args_, first_row_, num_rows_, begin, std::min(width, end - begin));
            for (int64_t unit = begin; unit < end; unit += width) {
                while (unit + width > end) {
                    width /= 2;
                }
                sweep(unit, width);
            }
        }
    }

  private:
    void prepare_rows() {
        const int64_t stride = args_.weight.pairs() * Rows::kBytesPerPair;
        for (int64_t r = 0; r < num_rows_; ++r) {
            x_[r] = Rows::prepare(args_.src, first_row_ + r, scratch_ + r * stride);
        }
    }

    // All rows of the block times `width` units; for Glu the left halves, then the right ones.
    void sweep(int64_t unit, int64_t width) {
        const std::byte* panels[2][kMaxPanels];
        for (int64_t i = 0; i < width; ++i) {
            panels[0][i] = panel(unit + i);
            panels[1][i] =
                args_.mode == LinearMode::Glu ? panel(args_.units() + unit + i) : nullptr;
        }
        // While these panels are read, the next ones are fetched: by each tile of rows its share,
        // so that memory is busy all the while. One tile alone reads them too fast for that.
        const int64_t bytes = args_.weight.panel_bytes(args_.weight.packing());
        const int64_t num_tiles = (num_rows_ + tile_rows_ - 1) / tile_rows_;
        const int64_t ahead_bytes = num_tiles == 1 ? kPrefetchBytes / width : width * bytes;
        const int64_t fetch_step = Weights::kStepBytes / num_tiles;
        const std::byte* fetched[2][kMaxPanels];
        for (int64_t i = 0; i < width; ++i) {
            fetched[0][i] = panels[0][i] + ahead_bytes;
            fetched[1][i] = panels[1][i] + ahead_bytes;
        }
        for (int64_t r = 0; r < num_rows_; r += tile_rows_) {
            const int64_t rows = std::min(tile_rows_, num_rows_ - r);
            const Dot dot = kDots.get(rows, static_cast<int>(width));
            alignas(64) float y[2][kTileFloats];
            const int64_t steps = args_.weight.pairs();
            dot(x_ + r, panels[0], fetched[0], fetch_step, 1, steps, y[0], width * kLanes);
            if (args_.mode == LinearMode::Glu) {
                dot(x_ + r, panels[1], fetched[1], fetch_step, 1, steps, y[1], width * kLanes);
            }
            for (int64_t i = 0; i < width; ++i) {
                fetched[0][i] += steps * fetch_step;
                fetched[1][i] += steps * fetch_step;
            }
            if (args_.slots != nullptr) {
                add_delta(args_, first_row_ + r, rows, unit, width, y[0], width * kLanes);
                if (args_.mode == LinearMode::Glu) {
                    add_delta(args_, first_row_ + r, rows, args_.units() + unit, width, y[1],
                              width * kLanes);
                }
            }
            const int64_t stride = width * kLanes;
            for (int64_t i = 0; i < width; ++i) {
                finish(args_, first_row_ + r, rows, unit + i, {y[0] + i * kLanes, stride},
                       {y[1] + i * kLanes, stride});
            }
        }
    }

    const std::byte* panel(int64_t index) const { return args_.weight.panel(index).data; }

    static constexpr DotTable<Weights, Sums::Own> kDots{};

    const LinearArgs& args_;
    std::byte* const scratch_;
    int64_t first_row_ = 0;  // of the block under way
    int64_t num_rows_ = 0;
    int64_t tile_rows_ = 0;
    const void* x_[kMaxBlockRows] = {};
};

}  // namespace

int64_t linear_scratch_bytes(const Panels& weight) {
    if (weight.is_quantized()) {
        return quantized_scratch_bytes(weight);
    }
    const int64_t row_bytes = weight.pairs() * FloatRows::kBytesPerPair;
#ifdef __AMX_BF16__
    return std::max(block_rows(weight) * row_bytes, AmxLinear::scratch_bytes(weight));
#else
    return block_rows(weight) * row_bytes;
#endif
}

int64_t linear_block_rows(const Panels& weight) {
    if (weight.is_quantized()) {
        return quantized_block_rows(weight);
    }
#ifdef __AMX_BF16__
    if (weight.packing() == Packing::BF16) {
        return AmxLinear::block_rows(weight);
    }
#endif
    return block_rows(weight);
}

void linear(const LinearArgs& args, int64_t begin, int64_t end, std::byte* scratch) {
    if (begin >= end) {
        return;
    }
    if (args.weight.is_quantized()) {
        linear_quantized(args, begin, end, scratch);
        return;
    }
    if (args.weight.packing() == Packing::F32) {
        Linear<F32Weights, FloatRows>(args, scratch).run(begin, end);
        return;
    }
#if defined(__AMX_BF16__)
    AmxLinear(args, scratch).run(begin, end);
#elif defined(__AVX512BF16__)
    Linear<Bf16Pairs, PairRows>(args, scratch).run(begin, end);
#else
    Linear<Bf16Weights, FloatRows>(args, scratch).run(begin, end);
#endif
}

}  // namespace octavo::cpu::OCTAVO_ISA
