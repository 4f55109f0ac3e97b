#include "cpu/linear_quantized.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "cpu/dot.h"
#include "cpu/integers.h"
#include "cpu/linear_finish.h"
#include "cpu/quantize.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// As in linear.cpp: a block of rows meets every panel while it is in the second cache.
constexpr int64_t kBlockBytes = 256 * 1024;
constexpr int64_t kMaxBlockRows = 96;
constexpr int64_t kMinBlockRows = 24;
static_assert(kMaxBlockRows % kIntegerRows == 0 && kMinBlockRows % kIntegerRows == 0);

// Ahead in the panels, which follow each other in memory.
constexpr int64_t kAheadBytes = 2048;

constexpr auto kGroupStride = static_cast<int64_t>(sizeof(ActivationGroup));

int64_t block_rows(int64_t num_groups) {
    const int64_t fitting = kBlockBytes / (num_groups * kGroupStride);
    return std::clamp(fitting / kIntegerRows * kIntegerRows, kMinBlockRows, kMaxBlockRows);
}

void prepare_row(const float* from, int64_t cols, ActivationGroup* to) {
    Vec poison = broadcast(0.0F);  // becomes NaN where a number is not finite
    ActivationGroup* group = to;
    for (int64_t c = 0; c < cols; c += kGroupColumns, ++group) {
        const int64_t count = cols - c;
        const Vec first = load_some(from + c, count);
        const Vec second = count > kLanes ? load_some(from + c + kLanes, count - kLanes)  //
                                          : broadcast(0.0F);
        poison = fma(first, broadcast(0.0F), fma(second, broadcast(0.0F), poison));
        quantize_activations(first, second, group);
    }
    if (!(reduce_add(poison) == 0.0F)) {
        to->scale = std::numeric_limits<float>::quiet_NaN();
    }
}

// out[r][lane] = the dot products of R rows with one panel. The floats stay in memory, and the
// registers hold the integers of a group.
template <class Weights, int R>
void dot_groups(const std::byte* x, int64_t x_stride, const std::byte* panel, int64_t num_groups,
                float* out) {
    constexpr bool has_minimum = Weights::kPacking == Packing::Q4;
    constexpr int64_t kBytes = has_minimum ? kQ4GroupBytes : kQ8GroupBytes;
    for (int r = 0; r < R; ++r) {
        store(out + r * kLanes, broadcast(0.0F));
    }
    for (int64_t g = 0; g < num_groups; ++g) {
        Integers sums[R] = {};
        for (int chunk = 0; chunk < Weights::kChunks; ++chunk) {
            if constexpr (R <= 2) {  // with few rows, memory is the limit
                prefetch(panel + chunk * kQuadBytes + kAheadBytes);
            }
            OCTAVO_UNROLL
            for (int i = 0; i < Weights::kPairs; ++i) {
                const Pairs w = Weights::pairs(panel + chunk * kQuadBytes, i);
                const std::byte* pair = x + (chunk * Weights::kPairs + i) * 4;
                OCTAVO_UNROLL
                for (int r = 0; r < R; ++r) {
                    sums[r] = multiply_add(sums[r], w, pair + r * x_stride);
                }
            }
        }
        asm volatile("" ::: "memory");  // the floats' registers are those of the integers
        const Vec scale = load_half(panel + scales_offset(Weights::kPacking));
        const Vec minimum =
            has_minimum ? load_half(panel + minima_offset(Weights::kPacking)) : broadcast(0.0F);
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            const auto* group = reinterpret_cast<const ActivationGroup*>(x + r * x_stride);
            Vec sum =
                fma(to_floats(sums[r]), scale * broadcast(group->scale), load(out + r * kLanes));
            if constexpr (has_minimum) {
                sum = fma(minimum, broadcast(group->sum), sum);
            }
            store(out + r * kLanes, sum);
        }
        x += kGroupStride;
        panel += kBytes;
    }
}

using DotGroups = void (*)(const std::byte*, int64_t, const std::byte*, int64_t, float*);

template <class Weights, int... Row>
constexpr std::array<DotGroups, sizeof...(Row)> dots_of(std::integer_sequence<int, Row...>) {
    return {dot_groups<Weights, Row + 1>...};
}

template <class Weights>
class QuantizedLinear {
  public:
    QuantizedLinear(const LinearArgs& args, std::byte* scratch)
        : args_(args),
          num_groups_(args.weight.groups()),
          stride_(num_groups_ * kGroupStride),
          scratch_(scratch) {}

    void run(int64_t begin, int64_t end) {
        const int64_t step = block_rows(num_groups_);
        for (first_row_ = 0; first_row_ < args_.num_rows; first_row_ += step) {
            num_rows_ = std::min(step, args_.num_rows - first_row_);
            for (int64_t r = 0; r < num_rows_; ++r) {
                prepare_row(reinterpret_cast<const float*>(args_.src.row(first_row_ + r)),
                            args_.src.cols,
                            reinterpret_cast<ActivationGroup*>(scratch_ + r * stride_));
            }
            for (int64_t unit = begin; unit < end; ++unit) {
                sweep(unit);
            }
        }
    }

  private:
    // All rows of the block times one unit.
    void sweep(int64_t unit) {
        const bool is_glu = args_.mode == LinearMode::Glu;
        const int64_t num_tiles = (num_rows_ + kIntegerRows - 1) / kIntegerRows;
        const int64_t tile_rows = (num_rows_ + num_tiles - 1) / num_tiles;
        for (int64_t r = 0; r < num_rows_; r += tile_rows) {
            const int64_t rows = std::min(tile_rows, num_rows_ - r);
            alignas(64) float y[2][kIntegerRows * kLanes];
            multiply(r, rows, unit, y[0]);
            if (is_glu) {
                multiply(r, rows, args_.units() + unit, y[1]);
            }
            for (int64_t i = 0; i < rows; ++i) {
                finish(args_, first_row_ + r + i, unit, y[0] + i * kLanes, y[1] + i * kLanes);
            }
        }
    }

    void multiply(int64_t row, int64_t num_rows, int64_t panel, float* y) const {
        kDots[static_cast<size_t>(num_rows - 1)](
            scratch_ + row * stride_, stride_,
            args_.weight.data + panel * args_.weight.panel_bytes(), num_groups_, y);
    }

    static constexpr auto kDots = dots_of<Weights>(std::make_integer_sequence<int, kIntegerRows>());

    const LinearArgs& args_;
    const int64_t num_groups_;
    const int64_t stride_;  // of a quantised row
    std::byte* const scratch_;
    int64_t first_row_ = 0;  // of the block under way
    int64_t num_rows_ = 0;
};

}  // namespace

int64_t quantized_scratch_bytes(const Panels& weight) {
    return block_rows(weight.groups()) * weight.groups() * kGroupStride;
}

void linear_quantized(const LinearArgs& args, int64_t begin, int64_t end, std::byte* scratch) {
    if (args.weight.packing == Packing::Q8) {
        QuantizedLinear<Q8Weights>(args, scratch).run(begin, end);
    } else {
        QuantizedLinear<Q4Weights>(args, scratch).run(begin, end);
    }
}

}  // namespace octavo::cpu::OCTAVO_ISA
