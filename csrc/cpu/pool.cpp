#include "cpu/pool.h"

#include <cmath>

#include "cpu/simd.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// What a sum of `count` rows is divided by.
float divisor(PoolKind kind, int64_t count) {
    const auto n = static_cast<float>(count);
    switch (kind) {
        case PoolKind::Mean:
            return n;
        case PoolKind::MeanSqrtLength:
            return std::sqrt(n);
        case PoolKind::WeightedMean:
            return n * (n + 1.0F) / 2.0F;
        case PoolKind::Max:
            break;
    }
    return 1.0F;
}

// A NaN in any row is one in the result: max() alone would drop it.
Vec highest(Vec x, Vec so_far) {
    const Vec zero = broadcast(0.0F);
    return max(x, so_far) + zero * x + zero * so_far;
}

void pool_one(const PoolArgs& args, int64_t seq) {
    const int64_t first = args.seq_starts[seq];
    const int64_t count = args.seq_starts[seq + 1] - first;
    const int64_t cols = args.src.cols;
    const auto* src = reinterpret_cast<const float*>(args.src.row(first));
    auto* dst = reinterpret_cast<float*>(args.dst.row(seq));
    for (int64_t c = 0; c < cols; c += kLanes) {
        const int64_t n = cols - c;
        Vec sum = count > 0 ? load_some(src + c, n) : broadcast(0.0F);
        for (int64_t r = 1; r < count; ++r) {
            const Vec x = load_some(src + r * cols + c, n);
            switch (args.kind) {
                case PoolKind::Mean:
                case PoolKind::MeanSqrtLength:
                    sum = sum + x;
                    break;
                case PoolKind::WeightedMean:
                    sum = fma(broadcast(static_cast<float>(r + 1)), x, sum);
                    break;
                case PoolKind::Max:
                    sum = highest(x, sum);
                    break;
            }
        }
        store_some(dst + c, sum / broadcast(divisor(args.kind, count)), n);
    }
}

}  // namespace

void pool(const PoolArgs& args, int64_t begin, int64_t end) {
    for (int64_t seq = begin; seq < end; ++seq) {
        pool_one(args, seq);
    }
}

}  // namespace octavo::cpu::OCTAVO_ISA
