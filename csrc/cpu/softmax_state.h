// The state of some rows' softmax: begun by attention, joined partition by partition, written out.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/math.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

using State = SoftmaxState;

float exp_of(float x) { return first_lane(exp(broadcast(x))); }

// Adds the later partition `part` to `total`, row by row.
void join(const State& total, const State& part, int64_t num_rows, int64_t dim) {
    for (int64_t r = 0; r < num_rows; ++r) {
        if (part.sum[r] == 0.0F) {
            continue;
        }
        float* to = total.values + r * dim;
        const float* from = part.values + r * dim;
        if (total.sum[r] == 0.0F) {
            std::copy_n(from, dim, to);
            total.maximum[r] = part.maximum[r];
            total.sum[r] = part.sum[r];
            continue;
        }
        const float maximum = std::max(total.maximum[r], part.maximum[r]);
        const float before = exp_of(total.maximum[r] - maximum);
        const float now = exp_of(part.maximum[r] - maximum);
        total.maximum[r] = maximum;
        total.sum[r] = std::fma(total.sum[r], before, part.sum[r] * now);
        for (int64_t i = 0; i < dim; i += kLanes) {
            const Vec added = load(from + i) * broadcast(now);
            store(to + i, fma(load(to + i), broadcast(before), added));
        }
    }
}

template <class T>
void write_row(T* to, const float* values, float sum, int64_t dim) {
    for (int64_t i = 0; i < dim; i += kLanes) {
        store_some(to + i, load(values + i) / broadcast(sum), kLanes);
    }
}

void write(const AttentionArgs& args, const QueryTile& tile, const State& total) {
    const int64_t dim = args.kv.value_dim();
    const int64_t group = args.group();
    for (int64_t r = 0; r < tile.num_tokens * group; ++r) {
        std::byte* row = args.dst.row(tile.first_token + r / group);
        const int64_t head = args.heads.first_head + tile.kv_head * group + r % group;
        const int64_t column = head * dim;
        const float* values = total.values + r * args.kv.head_dim;
        float sum = total.sum[r];
        if (args.sinks != nullptr) {  // where it is so high that exp is infinite, the rest is 0
            const int64_t own = tile.kv_head * group + r % group;
            sum += exp_of(args.sinks[own] - total.maximum[r]);
        }
        if (args.dst.dtype == Dtype::F32) {
            write_row(reinterpret_cast<float*>(row) + column, values, sum, dim);
        } else {
            write_row(reinterpret_cast<uint16_t*>(row) + column, values, sum, dim);
        }
    }
}

}  // namespace
}  // namespace octavo::cpu::OCTAVO_ISA
