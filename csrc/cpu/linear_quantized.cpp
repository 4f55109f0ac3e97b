#include "cpu/linear_quantized.h"

#include <algorithm>
#include <limits>

#include "cpu/adapters.h"
#include "cpu/integer_dot.h"
#include "cpu/linear_finish.h"
#ifdef __AMX_INT8__
#include "cpu/integer_tiles.h"
#endif

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// As in linear.cpp: a block of rows meets every panel while it is in the second cache. Processors
// with tiles have a large one, and are so quick that panels should come seldom.
#ifdef __AMX_INT8__
constexpr int64_t kBlockBytes = 1024 * 1024;
constexpr int64_t kMaxBlockRows = 240;
constexpr int64_t kMinBlockRows = 48;
#else
constexpr int64_t kBlockBytes = 256 * 1024;
constexpr int64_t kMaxBlockRows = 96;
constexpr int64_t kMinBlockRows = 24;
#endif
static_assert(kMaxBlockRows % kIntegerRows == 0 && kMinBlockRows % kIntegerRows == 0);

#ifdef __AMX_INT8__
static_assert(kMaxBlockRows % kTileHeight == 0 && kMinBlockRows % kTileHeight == 0);
#endif

// Unpacked at a time: they stay in the first cache. Whole blocks of every format.
constexpr int64_t kUnpackedGroups = 8;

// Of one worker, before its quantised rows.
struct alignas(64) Workspace {
    UnpackedGroup groups[kUnpackedGroups * kIntegerPanels];
    float y[kMaxBlockRows * kOutStride];  // [row][panel][lane]
};

int64_t block_rows(int64_t num_groups) {
    const int64_t fitting = kBlockBytes / (num_groups * kGroupStride);
    return std::clamp(fitting / kMinBlockRows * kMinBlockRows, kMinBlockRows, kMaxBlockRows);
}

// Where the groups of one row are put: beside each other, or in a tile.
template <class Group>
class InRow {
  public:
    explicit InRow(std::byte* row) : groups_(reinterpret_cast<Group*>(row)) {}
    Group* place(int64_t index) { return groups_ + index; }
    void placed(int64_t) {}

  private:
    Group* const groups_;
};

#ifdef __AMX_INT8__
template <class Rows>
class InTile {
  public:
    InTile(std::byte* rows, int64_t row, int64_t num_groups)
        : groups_(tile_of<Rows>(rows, row, num_groups)), row_(row % kTileHeight) {}
    typename Rows::Row* place(int64_t) { return &group_; }
    void placed(int64_t index) { groups_[index].put(row_, group_); }

  private:
    Rows* const groups_;
    const int64_t row_;
    typename Rows::Row group_;
};
#endif

// `quantize` makes a group of 32 columns.
template <class Places, class Quantize>
OCTAVO_INLINE void prepare_row(const float* from, int64_t cols, Places places, Quantize quantize) {
    Vec poison = broadcast(0.0F);  // becomes NaN where a number is not finite
    int64_t index = 0;
    for (int64_t c = 0; c < cols; c += kGroupColumns, ++index) {
        const int64_t count = cols - c;
        const Vec first = load_some(from + c, count);
        const Vec second = count > kLanes ? load_some(from + c + kLanes, count - kLanes)  //
                                          : broadcast(0.0F);
        poison = fma(first, broadcast(0.0F), fma(second, broadcast(0.0F), poison));
        quantize(first, second, places.place(index));
        places.placed(index);
    }
    if (!(reduce_add(poison) == 0.0F)) {
        places.place(index - 1)->scale = std::numeric_limits<float>::quiet_NaN();
        places.placed(index - 1);
    }
}

// Whether all panels take their rows as bytes, and in the same order.
bool all_take_bytes(const LinearArgs& args) {
    const int bits = format_of(args.weight.packing()).bits;
    return args.activation_bits == 8 &&
           std::all_of(args.weight.runs.begin(), args.weight.runs.begin() + args.weight.num_runs,
                       [&](const PanelRun& run) {
                           const Format& format = format_of(run.packing);
                           return format.bits == bits && takes_bytes(format);
                       });
}

// Whether the rows of the layer lie in tiles where all workers share them.
bool lie_in_tiles([[maybe_unused]] const LinearArgs& args) {
#ifdef __AMX_INT8__
    return args.in_tiles &&
           std::all_of(args.weight.runs.begin(), args.weight.runs.begin() + args.weight.num_runs,
                       [](const PanelRun& run) { return takes_tiles(format_of(run.packing)); });
#else
    return false;
#endif
}

// Rows as they go alone, or in tiles.
void quantize(const LinearArgs& args, int64_t begin, int64_t end, std::byte* rows,
              [[maybe_unused]] bool in_tiles) {
    const int64_t cols = args.src.cols;
    const int64_t stride = quantized_row_bytes(args);
    const bool takes_bytes = all_take_bytes(args);
    const float highest = highest_activation(args.activation_bits);
    const uint8_t* order = kQuadOrder[format_of(args.weight.packing()).bits == 4 ? 1 : 0];
    const auto to_bytes = [&](Vec first, Vec second, ByteGroup* group) {
        quantize_activations(first, second, order, group);
    };
    const auto to_words = [&](Vec first, Vec second, ActivationGroup* group) {
        quantize_activations(first, second, highest, group);
    };
    for (int64_t r = begin; r < end; ++r) {
        const auto* from = reinterpret_cast<const float*>(args.src.row(r));
#ifdef __AMX_INT8__
        if (in_tiles) {
            const int64_t num_groups = args.weight.groups();
            takes_bytes ? prepare_row(from, cols, InTile<ByteRows>(rows, r, num_groups), to_bytes)
                        : prepare_row(from, cols, InTile<WordRows>(rows, r, num_groups), to_words);
            continue;
        }
#endif
        takes_bytes ? prepare_row(from, cols, InRow<ByteGroup>(rows + r * stride), to_bytes)
                    : prepare_row(from, cols, InRow<ActivationGroup>(rows + r * stride), to_words);
    }
}

class QuantizedLinear {
  public:
    QuantizedLinear(const LinearArgs& args, std::byte* scratch)
        : args_(args),
          num_groups_(args.weight.groups()),
          takes_bytes_(all_take_bytes(args)),
          stride_(quantized_row_bytes(args)),
          work_(*reinterpret_cast<Workspace*>(scratch)),
          own_rows_(scratch + sizeof(Workspace))
#ifdef __AMX_INT8__
          ,
          tiles_(own_rows_ + block_rows(num_groups_) * num_groups_ * kGroupStride, num_groups_)
#endif
    {
    }

    void run(int64_t begin, int64_t end) {
        const int64_t step = block_rows(num_groups_);
        fetch_ends_[0] = end_of(end - 1);
        fetch_ends_[1] = args_.mode == LinearMode::Glu ? end_of(args_.units() + end - 1)  //
                                                       : fetch_ends_[0];
        for (first_row_ = 0; first_row_ < args_.num_rows; first_row_ += step) {
            num_rows_ = std::min(step, args_.num_rows - first_row_);
            take_rows();
            fetch_deltas(args_, first_row_, num_rows_, begin,
                         std::min<int64_t>(kIntegerPanels, end - begin));
            if (args_.mode == LinearMode::Glu) {
                for (int64_t unit = begin; unit < end; ++unit) {
                    multiply(args_.weight.panel(unit), args_.weight.panel(args_.units() + unit));
                    adapt(unit, 0);
                    adapt(args_.units() + unit, 1);
                    finish(args_, first_row_, num_rows_, unit, y(0), y(1));
                }
            } else {
                multiply_runs(begin, end);
            }
            release_tiles();
        }
    }

  private:
    // The block's rows as the kernels want them: in tiles, or alone.
    void take_rows() {
        x_ = own_rows_;
        if (args_.quantized == nullptr) {
            LinearArgs block = args_;
            block.src.data = args_.src.row(first_row_);
            quantize(block, 0, num_rows_, own_rows_, false);
            return;
        }
        const std::byte* const from = args_.quantized + first_row_ * stride_;
#ifdef __AMX_INT8__
        const bool in_tiles = lie_in_tiles(args_);
        is_tiled_ = in_tiles && num_rows_ >= kFewestTiled;
        if (is_tiled_) {
            const RowForm words = args_.activation_bits == 8 ? RowForm::Low : RowForm::Both;
            tiles_.begin(from, stride_, num_rows_, takes_bytes_ ? RowForm::Bytes : words);
        } else if (in_tiles) {
            const auto take = takes_bytes_ ? take_row<ByteRows> : take_row<WordRows>;
            for (int64_t r = 0; r < num_rows_; ++r) {
                take(from, r, num_groups_, own_rows_ + r * stride_);
            }
            return;
        }
#endif
        x_ = from;
    }

    void release_tiles() {
#ifdef __AMX_INT8__
        if (is_tiled_) {
            TiledRows::end();
        }
#endif
    }

    void multiply_runs(int64_t begin, int64_t end) {
        for (int64_t first = begin, last = begin; first < end; first = last) {
            const Packing packing = args_.weight.panel(first).packing;
            while (last < end && args_.weight.panel(last).packing == packing) {
                ++last;
            }
            multiply_equal(first, last);
        }
    }

    // Some neighbouring panels of one packing. Where two go together, they are one of the first
    // half and one of the second: so both are read on and on, and what is fetched ahead is wanted
    // next.
    void multiply_equal(int64_t begin, int64_t end) {
        const int64_t num_pairs = (end - begin) / 2;
        const int64_t step = kPackedPanels == 2 ? 1 : 2;
        const int64_t apart = kPackedPanels == 2 ? num_pairs : 1;
        if (num_pairs > 0 && kPackedPanels == 2) {
            fetch_ends_[0] = end_of(begin + num_pairs - 1);
        }
        for (int64_t i = 0; i < num_pairs; ++i) {
            const int64_t units[] = {begin + i * step, begin + i * step + apart};
            multiply(args_.weight.panel(units[0]), args_.weight.panel(units[1]));
            for (int index = 0; index < 2; ++index) {
                finish_store(units[index], index);
            }
        }
        fetch_ends_[0] = fetch_ends_[1];
        if ((end - begin) % 2 == 1) {
            multiply(args_.weight.panel(end - 1));
            finish_store(end - 1, 0);
        }
    }

    void finish_store(int64_t unit, int index) {
        adapt(unit, index);
        finish(args_, first_row_, num_rows_, unit, y(index));
    }

    // Behind a panel.
    const std::byte* end_of(int64_t index) const {
        const Panel panel = args_.weight.panel(index);
        return panel.data + args_.weight.panel_bytes(panel.packing);
    }

    Sums16 y(int64_t panel) const { return {work_.y + panel * kLanes, kOutStride}; }

    // y[r][p] = all rows of the block times the panels.
    void multiply(Panel left, Panel right) {
        if (is_tiled_) {
            multiply_alone(left, 0);
            multiply_alone(right, 1);
            return;
        }
        clear(0, kIntegerPanels);
        const IntegerKernels& of_left = kernels_of(left);
        const IntegerKernels& of_right = kernels_of(right);
        const bool is_few = num_rows_ <= std::max(of_left.few_rows, of_right.few_rows);
        const bool is_packed = takes_bytes_ || is_few;
        if (is_packed && kPackedPanels == 2 && left.packing == right.packing) {
            const FetchedPanel panels[] = {{left.data, fetch_ends_[0]},
                                           {right.data, fetch_ends_[1]}};
            multiply_packed(of_left, panels, 2, 0);
        } else if (is_packed || of_left.dot_unpacked != of_right.dot_unpacked) {
            multiply_alone(left, 0);
            multiply_alone(right, 1);
        } else {
            for (int64_t group = 0; group < num_groups_; group += kUnpackedGroups) {
                const int64_t count = std::min(kUnpackedGroups, num_groups_ - group);
                of_left.unpack(left.data, group, count, work_.groups);
                of_right.unpack(right.data, group, count, work_.groups + 1);
                sweep(of_left, group, count, 0, 2);
            }
        }
    }

    // Of one of the layer's panels, whose sums are panel `index` of y.
    void adapt(int64_t panel, int index) {
        if (args_.slots != nullptr) {
            add_delta(args_, first_row_, num_rows_, panel, 1, work_.y + index * kLanes, kOutStride);
        }
    }

    void multiply(Panel panel) {
        clear(0, 1);
        multiply_alone(panel, 0);
    }

    void multiply_alone(Panel panel, int index) {
#ifdef __AMX_INT8__
        if (is_tiled_) {
            tiles_.multiply(panel.packing, {panel.data, fetch_ends_[index]},
                            work_.y + index * kLanes);
            return;
        }
#endif
        const IntegerKernels& kernels = kernels_of(panel);
        if (takes_bytes_ || num_rows_ <= kernels.few_rows) {
            const FetchedPanel as_packed{panel.data, fetch_ends_[index]};
            multiply_packed(kernels, &as_packed, 1, index);
            return;
        }
        for (int64_t group = 0; group < num_groups_; group += kUnpackedGroups) {
            const int64_t count = std::min(kUnpackedGroups, num_groups_ - group);
            kernels.unpack(panel.data, group, count, work_.groups + index);
            sweep(kernels, group, count, index, 1);
        }
    }

    // All rows of the block times some panels as they are packed, whose sums begin with panel
    // `index` of y.
    void multiply_packed(const IntegerKernels& kernels, const FetchedPanel* panels, int num_panels,
                         int index) {
        const auto table = static_cast<size_t>(num_panels - 1);
        const int height = takes_bytes_ ? byte_rows(num_panels) : kernels.packed_rows[table];
        const DotPacked* dots = takes_bytes_ ? kernels.dot_bytes[table].data()  //
                                             : kernels.dot_packed[table].data();
        for_each_tile(height, [&](int64_t row, int64_t count) {
            dots[count - 1](panels, num_groups_, x_ + row * stride_, stride_,
                            work_.y + row * kOutStride + index * kLanes);
        });
    }

    static const IntegerKernels& kernels_of(Panel panel) {
        return kIntegerKernels[static_cast<size_t>(panel.packing)];
    }

    void clear(int panel, int num_panels) {
        for (int64_t r = 0; r < num_rows_; ++r) {
            std::fill_n(work_.y + r * kOutStride + panel * kLanes, num_panels * kLanes, 0.0F);
        }
    }

    // Of the block's rows, as even in height as may be.
    template <class F>
    void for_each_tile(int64_t height, F f) {
        const int64_t num_tiles = (num_rows_ + height - 1) / height;
        for (int64_t tile = 0, row = 0; tile < num_tiles; ++tile) {
            const int64_t end = num_rows_ * (tile + 1) / num_tiles;
            f(row, end - row);
            row = end;
        }
    }

    // All rows go on by the groups that are unpacked.
    void sweep(const IntegerKernels& kernels, int64_t group, int64_t count, int panel,
               int num_panels) {
        const auto& dots = (*kernels.dot_unpacked)[static_cast<size_t>(num_panels - 1)];
        for_each_tile(integer_rows(num_panels), [&](int64_t row, int64_t height) {
            dots[static_cast<size_t>(height - 1)](
                work_.groups + panel, count, x_ + row * stride_ + group * kGroupStride, stride_,
                work_.y + row * kOutStride + panel * kLanes);
        });
    }

    const LinearArgs& args_;
    const int64_t num_groups_;
    const bool takes_bytes_;
    const int64_t stride_;  // of a quantised row
    Workspace& work_;
    std::byte* const own_rows_;
#ifdef __AMX_INT8__
    TiledRows tiles_;
#endif
    bool is_tiled_ = false;
    const std::byte* fetch_ends_[kIntegerPanels] = {};  // of the panels at hand, left and right
    const std::byte* x_ = nullptr;                      // the quantised rows of the block under way
    int64_t first_row_ = 0;                             // of the block
    int64_t num_rows_ = 0;
};

}  // namespace

int64_t quantized_scratch_bytes(const Panels& weight) {
    const int64_t groups = weight.groups();
    const int64_t rows = static_cast<int64_t>(sizeof(Workspace)) +  //
                         block_rows(groups) * groups * kGroupStride;
#ifdef __AMX_INT8__
    return rows + TiledRows::scratch_bytes(groups);
#else
    return rows;
#endif
}

int64_t quantized_row_bytes(const LinearArgs& args) {
    const auto group =
        static_cast<int64_t>(all_take_bytes(args) ? sizeof(ByteGroup) : sizeof(ActivationGroup));
    return args.weight.groups() * group;
}

void quantize_rows(const LinearArgs& args, int64_t begin, int64_t end, std::byte* rows) {
    quantize(args, begin, end, rows, lie_in_tiles(args));
}

int64_t quantized_block_rows(const Panels& weight) { return block_rows(weight.groups()); }

void linear_quantized(const LinearArgs& args, int64_t begin, int64_t end, std::byte* scratch) {
    QuantizedLinear(args, scratch).run(begin, end);
}

}  // namespace octavo::cpu::OCTAVO_ISA
