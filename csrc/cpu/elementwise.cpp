#include "cpu/elementwise.h"

#include <algorithm>

#include "cpu/math.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// f(i, count): the 16 values from column i on, of which count are within the row.
template <class To, class F>
OCTAVO_INLINE void fill_row(std::byte* row, int64_t cols, F f) {
    auto* to = reinterpret_cast<To*>(row);
    for (int64_t i = 0; i < cols; i += kLanes) {
        store_some(to + i, f(i, cols - i), cols - i);
    }
}

template <class To, class From>
void compute_row(const RowOpArgs& args, std::byte* dst, const std::byte* src, int64_t row) {
    const auto* x = reinterpret_cast<const From*>(src);
    const int64_t cols = args.dst.cols;
    const Vec factor = broadcast(args.factor);
    switch (args.op) {
        case RowOp::Select:
            if (args.factors != nullptr) {
                const Vec own = broadcast(args.factors[row]);
                fill_row<To>(dst, cols,
                             [=](int64_t i, int64_t n) { return load_some(x + i, n) * own; });
                return;
            }
            [[fallthrough]];
        case RowOp::Convert:
            fill_row<To>(dst, cols, [=](int64_t i, int64_t n) { return load_some(x + i, n); });
            return;
        case RowOp::Add: {
            const auto* y = reinterpret_cast<const float*>(args.other.row(row));
            fill_row<To>(dst, cols, [=](int64_t i, int64_t n) {
                return load_some(x + i, n) + factor * load_some(y + i, n);
            });
            return;
        }
        case RowOp::Multiply: {
            const auto* y = reinterpret_cast<const float*>(args.other.row(row));
            fill_row<To>(dst, cols, [=, &args](int64_t i, int64_t n) {
                return load_some(x + i, n) * activate(args.activation, load_some(y + i, n));
            });
            return;
        }
        case RowOp::Columns: {
            const auto* from = x + args.first;
            fill_row<To>(dst, cols, [=](int64_t i, int64_t n) { return load_some(from + i, n); });
            return;
        }
        case RowOp::Scale:
            fill_row<To>(dst, cols,
                         [=](int64_t i, int64_t n) { return load_some(x + i, n) * factor; });
            return;
        case RowOp::SoftCap:
            fill_row<To>(dst, cols, [=](int64_t i, int64_t n) {
                return factor * tanh(load_some(x + i, n) / factor);
            });
            return;
        case RowOp::Clamp:  // in this order of arguments a NaN survives
            fill_row<To>(dst, cols, [=](int64_t i, int64_t n) {
                const Vec below = min(factor, load_some(x + i, n));
                return max(broadcast(0.0F) - factor, below);
            });
            return;
        case RowOp::Activation:
            fill_row<To>(dst, cols, [=, &args](int64_t i, int64_t n) {
                return activate(args.activation, load_some(x + i, n));
            });
            return;
        case RowOp::Glu:
            fill_row<To>(dst, cols, [=, &args](int64_t i, int64_t n) {
                return gated(args.activation, load_some(x + i, n), load_some(x + cols + i, n));
            });
            return;
    }
}

}  // namespace

void row_op(const RowOpArgs& args, int64_t begin, int64_t end) {
    const bool to_float = args.dst.dtype == Dtype::F32;
    const bool from_float = args.src.dtype == Dtype::F32;
    for (int64_t r = begin; r < end; ++r) {
        std::byte* dst = args.dst.row(r);
        if (args.rows != nullptr && args.rows[r] < 0) {
            std::fill_n(dst, args.dst.cols * size_of(args.dst.dtype), std::byte{0});
            continue;
        }
        const std::byte* src = args.src.row(args.rows == nullptr ? r : args.rows[r]);
        if (to_float) {
            from_float ? compute_row<float, float>(args, dst, src, r)
                       : compute_row<float, uint16_t>(args, dst, src, r);
        } else {
            from_float ? compute_row<uint16_t, float>(args, dst, src, r)
                       : compute_row<uint16_t, uint16_t>(args, dst, src, r);
        }
    }
}

}  // namespace octavo::cpu::OCTAVO_ISA
