#include "cpu/linear_quantized.h"

#include <algorithm>
#include <limits>

#include "cpu/integer_dot.h"
#include "cpu/linear_finish.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// As in linear.cpp: a block of rows meets every panel while it is in the second cache.
constexpr int64_t kBlockBytes = 256 * 1024;
constexpr int64_t kMaxBlockRows = 96;
constexpr int64_t kMinBlockRows = 24;
static_assert(kMaxBlockRows % kIntegerRows == 0 && kMinBlockRows % kIntegerRows == 0);

// Unpacked at a time: they stay in the first cache. Whole blocks of every format.
constexpr int64_t kUnpackedGroups = 8;

// Of one worker, before its quantised rows.
struct alignas(64) Workspace {
    UnpackedGroup groups[kUnpackedGroups];
    float y[2][kMaxBlockRows * kLanes];
};

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

class QuantizedLinear {
  public:
    QuantizedLinear(const LinearArgs& args, std::byte* scratch)
        : args_(args),
          num_groups_(args.weight.groups()),
          stride_(num_groups_ * kGroupStride),
          work_(*reinterpret_cast<Workspace*>(scratch)),
          x_(scratch + sizeof(Workspace)) {}

    void run(int64_t begin, int64_t end) {
        const int64_t step = block_rows(num_groups_);
        const bool is_glu = args_.mode == LinearMode::Glu;
        for (first_row_ = 0; first_row_ < args_.num_rows; first_row_ += step) {
            num_rows_ = std::min(step, args_.num_rows - first_row_);
            for (int64_t r = 0; r < num_rows_; ++r) {
                prepare_row(reinterpret_cast<const float*>(args_.src.row(first_row_ + r)),
                            args_.src.cols, reinterpret_cast<ActivationGroup*>(x_ + r * stride_));
            }
            for (int64_t unit = begin; unit < end; ++unit) {
                multiply(unit, work_.y[0]);
                if (is_glu) {
                    multiply(args_.units() + unit, work_.y[1]);
                }
                for (int64_t r = 0; r < num_rows_; ++r) {
                    finish(args_, first_row_ + r, unit, work_.y[0] + r * kLanes,
                           work_.y[1] + r * kLanes);
                }
            }
        }
    }

  private:
    // y[r] = all rows of the block times one panel.
    void multiply(int64_t index, float* y) {
        const Panel panel = args_.weight.panel(index);
        const IntegerKernels& kernels = kIntegerKernels[static_cast<size_t>(panel.packing)];
        std::fill_n(y, num_rows_ * kLanes, 0.0F);
        if (num_rows_ <= kFewRows) {
            kernels.dot_packed[static_cast<size_t>(num_rows_ - 1)](panel.data, num_groups_, x_,
                                                                   stride_, y);
            return;
        }
        // Tiles as even in height as may be.
        const int64_t num_tiles = (num_rows_ + kIntegerRows - 1) / kIntegerRows;
        for (int64_t group = 0; group < num_groups_; group += kUnpackedGroups) {
            const int64_t count = std::min(kUnpackedGroups, num_groups_ - group);
            kernels.unpack(panel.data, group, count, work_.groups);
            for (int64_t tile = 0, row = 0; tile < num_tiles; ++tile) {
                const int64_t end = num_rows_ * (tile + 1) / num_tiles;
                (*kernels.dot_unpacked)[static_cast<size_t>(end - row - 1)](
                    work_.groups, count, x_ + row * stride_ + group * kGroupStride, stride_,
                    y + row * kLanes);
                row = end;
            }
        }
    }

    const LinearArgs& args_;
    const int64_t num_groups_;
    const int64_t stride_;  // of a quantised row
    Workspace& work_;
    std::byte* const x_;     // the quantised rows of the block under way
    int64_t first_row_ = 0;  // of the block
    int64_t num_rows_ = 0;
};

}  // namespace

int64_t quantized_scratch_bytes(const Panels& weight) {
    return static_cast<int64_t>(sizeof(Workspace)) +
           block_rows(weight.groups()) * weight.groups() * kGroupStride;
}

void linear_quantized(const LinearArgs& args, int64_t begin, int64_t end, std::byte* scratch) {
    QuantizedLinear(args, scratch).run(begin, end);
}

}  // namespace octavo::cpu::OCTAVO_ISA
