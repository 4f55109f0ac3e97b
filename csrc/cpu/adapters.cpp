#include "cpu/adapters.h"

#include <algorithm>

#include "cpu/dot.h"
#include "cpu/rows.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// Chains that are under way at once where each has a row and a panel of its own: one alone would
// wait for each of its additions.
constexpr int kChains = kAccumulators < 8 ? kAccumulators : 8;

// From so many neighbouring rows with one adapter on, its weights are read once for several rows.
constexpr int64_t kTileFrom = 3;

// out[i][lane] = x[i] · panel i.
template <class Weights>
void dot_each(const void* const* x, const std::byte* const* panels, int64_t steps,
              float (*out)[kLanes]) {
    using X = typename Weights::X;
    Vec sums[kChains];
    const X* row[kChains];
    const std::byte* w[kChains];
    OCTAVO_UNROLL
    for (int i = 0; i < kChains; ++i) {
        sums[i] = broadcast(0.0F);
        row[i] = static_cast<const X*>(x[i]);
        w[i] = panels[i];
    }
    for (int64_t j = 0; j < steps; ++j) {
        OCTAVO_UNROLL
        for (int column = 0; column < Weights::kXs; ++column) {
            OCTAVO_UNROLL
            for (int i = 0; i < kChains; ++i) {
                const Vec weights = Weights::column(w[i] + j * Weights::kStepBytes, column);
                sums[i] = Weights::add(sums[i], row[i][j * Weights::kXs + column], weights);
            }
        }
    }
    OCTAVO_UNROLL
    for (int i = 0; i < kChains; ++i) {
        store(out[i], sums[i]);
    }
}

template <class Weights, class Rows>
class Shrink {
  public:
    Shrink(const ShrinkArgs& args, std::byte* scratch)
        : args_(args),
          scratch_(scratch),
          steps_((args.src.cols + 1) / 2),
          stride_(steps_ * Rows::kBytesPerPair) {}

    void run(int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end;) {
            const AdapterWeights* weights = of(i);
            int64_t next = i + 1;
            while (next < end && next - i < kTileRows && of(next) == weights) {
                ++next;
            }
            if (weights != nullptr && next - i >= kTileFrom) {
                tile(*weights, i, next - i);
            } else if (weights != nullptr) {
                for (int64_t r = i; r < next; ++r) {
                    chains(*weights, args_.rows[r]);
                }
            }
            i = next;
        }
        flush();
    }

  private:
    const AdapterWeights* of(int64_t index) const {
        return args_.adapters[args_.slots[args_.rows[index]]];
    }

    float* u(int64_t row, int64_t panel) const {
        return reinterpret_cast<float*>(args_.u.row(row)) + panel * kLanes;
    }

    static const std::byte* panel_of(const AdapterWeights& weights, int64_t panel) {
        return weights.data + panel * weights.down_panel_bytes;
    }

    void put(const AdapterWeights& weights, int64_t row, int64_t panel, const float* sums) const {
        store(u(row, panel), load(weights.scales + panel * kLanes) * load(sums));
    }

    // Some rows with one adapter.
    void tile(const AdapterWeights& weights, int64_t first, int64_t count) {
        flush();  // the rows that it holds lie in the same scratch
        const void* x[kTileRows];
        for (int64_t r = 0; r < count; ++r) {
            x[r] = Rows::prepare(args_.src, args_.rows[first + r], scratch_ + r * stride_);
        }
        const int64_t num_panels = weights.num_ranks / kLanes;
        int64_t width = max_panels(count);
        for (int64_t panel = 0; panel < num_panels; panel += width) {
            while (panel + width > num_panels) {
                width /= 2;
            }
            const std::byte* panels[kMaxPanels];
            for (int64_t p = 0; p < width; ++p) {
                panels[p] = panel_of(weights, panel + p);
            }
            alignas(64) float y[kTileFloats];
            kDots.get(count, static_cast<int>(width))(x, panels, panels, Weights::kStepBytes, 1,
                                                      steps_, y, width * kLanes);
            for (int64_t r = 0; r < count; ++r) {
                for (int64_t p = 0; p < width; ++p) {
                    put(weights, args_.rows[first + r], panel + p, y + (r * width + p) * kLanes);
                }
            }
        }
    }

    // One row, beside others whose adapters may be others.
    void chains(const AdapterWeights& weights, int64_t row) {
        std::byte* own = scratch_ + next_row_ * stride_;
        next_row_ = (next_row_ + 1) % (kChains + 1);  // those under way, and this one
        const void* x = Rows::prepare(args_.src, row, own);
        for (int64_t panel = 0; panel < weights.num_ranks / kLanes; ++panel) {
            pending_[num_pending_] = {&weights, row, panel};
            x_[num_pending_] = x;
            panels_[num_pending_] = panel_of(weights, panel);
            if (++num_pending_ == kChains) {
                flush();
            }
        }
    }

    void flush() {
        if (num_pending_ == 0) {
            return;
        }
        for (int i = num_pending_; i < kChains; ++i) {  // computed once more
            x_[i] = x_[0];
            panels_[i] = panels_[0];
        }
        alignas(64) float y[kChains][kLanes];
        dot_each<Weights>(x_, panels_, steps_, y);
        for (int i = 0; i < num_pending_; ++i) {
            put(*pending_[i].weights, pending_[i].row, pending_[i].panel, y[i]);
        }
        num_pending_ = 0;
    }

    struct Pending {
        const AdapterWeights* weights;
        int64_t row;
        int64_t panel;
    };

    static constexpr DotTable<Weights, Sums::Own> kDots{};

    const ShrinkArgs& args_;
    std::byte* const scratch_;
    const int64_t steps_;
    const int64_t stride_;  // of a row in scratch
    Pending pending_[kChains];
    const void* x_[kChains];
    const std::byte* panels_[kChains];
    int num_pending_ = 0;
    int64_t next_row_ = 0;
};

const AdapterRun* run_of(const AdapterWeights& weights, int64_t panel) {
    const AdapterRun* run = weights.runs;
    while (run->end <= panel) {
        ++run;
    }
    return run;
}

// Neighbouring rows with one adapter, up to kTileRows.
template <class Weights>
void expand(const AdapterWeights& weights, const float* const* u, int64_t num_rows, int64_t panel,
            int64_t num_panels, float* y, int64_t stride) {
    static constexpr DotTable<Weights, Sums::Joined> kDots{};
    const AdapterRun* run = run_of(weights, panel);
    for (int64_t p = 0; p < num_panels;) {
        const int64_t bytes = run->pairs * Weights::kStepBytes;
        const int64_t count = std::min(num_panels - p, run->end - (panel + p));
        int64_t width = max_panels(num_rows);
        while (width > count) {
            width /= 2;
        }
        if (bytes != 0) {
            const void* x[kTileRows];
            for (int64_t r = 0; r < num_rows; ++r) {
                x[r] = u[r] + run->first;
            }
            const std::byte* panels[kMaxPanels];
            const std::byte* fetched[kMaxPanels];
            for (int64_t i = 0; i < width; ++i) {
                panels[i] = weights.data + run->offset + (panel + p + i) * bytes;
                fetched[i] = panels[i] + width * bytes;  // the next unit's
            }
            kDots.get(num_rows, static_cast<int>(width))(x, panels, fetched, Weights::kStepBytes, 1,
                                                         run->pairs, y + p * kLanes, stride);
        }
        p += width;
        run += panel + p == run->end;
    }
}

// Where rows `first` … `first + count` have an adapter, calls with its weights and how many
// neighbours from `r` on, up to kTileRows, share it: each(weights, r, count).
template <class Each>
void for_adapters(const LinearArgs& args, int64_t first, int64_t num_rows, Each each) {
    for (int64_t r = 0; r < num_rows;) {
        const int32_t slot = args.slots[first + r];
        int64_t count = 1;
        while (r + count < num_rows && count < kTileRows && args.slots[first + r + count] == slot) {
            ++count;
        }
        const AdapterWeights* weights = slot < 0 ? nullptr : args.adapters[slot];
        if (weights != nullptr) {
            each(*weights, r, count);
        }
        r += count;
    }
}

int64_t step_bytes(const AdapterWeights& weights) {
    return weights.dtype == Dtype::F32 ? F32Weights::kStepBytes : Bf16Weights::kStepBytes;
}

}  // namespace

int64_t shrink_scratch_bytes(int64_t cols) {
    return std::max<int64_t>(kChains + 1, kTileRows) * ((cols + 1) / 2) * FloatRows::kBytesPerPair;
}

void shrink(const ShrinkArgs& args, int64_t begin, int64_t end, std::byte* scratch) {
    if (args.dtype == Dtype::F32) {
        Shrink<F32Weights, FloatRows>(args, scratch).run(begin, end);
        return;
    }
#ifdef __AVX512BF16__
    if (args.src.dtype == Dtype::BF16) {
        Shrink<Bf16Pairs, PairRows>(args, scratch).run(begin, end);
        return;
    }
#endif
    Shrink<Bf16Weights, FloatRows>(args, scratch).run(begin, end);
}

void fetch_deltas(const LinearArgs& args, int64_t first_row, int64_t num_rows, int64_t unit,
                  int64_t num_units) {
    if (args.slots == nullptr || num_units <= 0) {
        return;
    }
    const auto fetch = [&](const AdapterWeights& weights, int64_t panel) {
        const AdapterRun* run = run_of(weights, panel);
        const int64_t bytes = run->pairs * step_bytes(weights);
        const std::byte* from = weights.data + run->offset + panel * bytes;
        for (int64_t i = 0; i < num_units * bytes; i += kLineBytes) {
            prefetch(from + i);
        }
    };
    for_adapters(args, first_row, num_rows, [&](const AdapterWeights& weights, int64_t, int64_t) {
        fetch(weights, unit);
        if (args.mode == LinearMode::Glu) {
            fetch(weights, args.units() + unit);
        }
    });
}

void add_delta(const LinearArgs& args, int64_t first_row, int64_t num_rows, int64_t panel,
               int64_t num_panels, float* y, int64_t stride) {
    for_adapters(args, first_row, num_rows,
                 [&](const AdapterWeights& weights, int64_t first, int64_t count) {
                     const float* u[kTileRows];
                     for (int64_t r = 0; r < count; ++r) {
                         u[r] = reinterpret_cast<const float*>(args.u.row(first_row + first + r));
                     }
                     float* to = y + first * stride;
                     weights.dtype == Dtype::F32
                         ? expand<F32Weights>(weights, u, count, panel, num_panels, to, stride)
                         : expand<Bf16Weights>(weights, u, count, panel, num_panels, to, stride);
                 });
}

}  // namespace octavo::cpu::OCTAVO_ISA
