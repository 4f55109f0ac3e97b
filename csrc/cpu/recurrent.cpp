#include "cpu/recurrent.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/math.h"
#include "cpu/norm.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

constexpr int64_t kBlock = 4;  // vectors of a head's columns that stay in registers

float exp_of_one(float x) { return first_lane(exp(broadcast(x))); }
float sigmoid_of(float x) { return 1.0F / (1.0F + exp_of_one(-x)); }

// log(1 + e^x). With y = e^-|x| in (0, 1], log(1 + y) = 2 atanh(y / (2 + y)): its series in s <=
// 1/3.
float softplus(float x) {
    const float y = exp_of_one(-std::fabs(x));
    const float s = y / (2.0F + y);
    const float z = s * s;
    float p = 1.0F / 17.0F;
    for (const float odd : {15.0F, 13.0F, 11.0F, 9.0F, 7.0F, 5.0F, 3.0F, 1.0F}) {
        p = p * z + 1.0F / odd;
    }
    return std::max(x, 0.0F) + 2.0F * s * p;
}

// The same of each lane.
Vec softplus(Vec x) {
    const Vec y = exp(broadcast(0.0F) - abs(x));
    const Vec s = y / (broadcast(2.0F) + y);
    const Vec z = s * s;
    Vec p = broadcast(1.0F / 17.0F);
    for (const float odd : {15.0F, 13.0F, 11.0F, 9.0F, 7.0F, 5.0F, 3.0F, 1.0F}) {
        p = fma(p, z, broadcast(1.0F / odd));
    }
    return fma(s + s, p, max(broadcast(0.0F), x));
}

// A unit's part of the state, before the sequence's first token of the step.
float* begin_state(const StateArgs& state, int64_t seq, int64_t offset, int64_t count) {
    float* live = state.at(state.slots[seq]) + offset;
    if (state.is_new(seq)) {
        std::memset(live, 0, static_cast<size_t>(count) * sizeof(float));
    }
    return live;
}

// The same part in the slot where it is saved behind this token, or null.
float* save_place(const StateArgs& state, int64_t token, int64_t offset) {
    const int32_t slot = state.saves == nullptr ? -1 : state.saves[token];
    return slot < 0 ? nullptr : state.at(slot) + offset;
}

void save_state(const StateArgs& state, int64_t token, int64_t offset, const float* live,
                int64_t count) {
    if (float* place = save_place(state, token, offset)) {
        std::memcpy(place, live, static_cast<size_t>(count) * sizeof(float));
    }
}

const float* floats(const Matrix& matrix, int64_t row) {
    return reinterpret_cast<const float*>(matrix.row(row));
}
float* floats_of(const Matrix& matrix, int64_t row) {
    return reinterpret_cast<float*>(matrix.row(row));
}

// Channels [c, c + n): the last inputs are in `past`, oldest first.
void convolve(const ConvArgs& args, int64_t seq, int64_t c, int64_t n) {
    const int64_t width = args.dst.cols;
    const int64_t kernel = args.kernel;
    float* live = args.state.at(args.state.slots[seq]) + c;
    Vec past[kMaxConvKernel];
    Vec weight[kMaxConvKernel];
    for (int64_t k = 0; k < kernel; ++k) {
        weight[k] = load_some(args.weight + k * width + c, n);
        past[k] = broadcast(0.0F);
    }
    if (!args.state.is_new(seq)) {
        for (int64_t k = 0; k + 1 < kernel; ++k) {
            past[k] = load_some(live + k * width, n);
        }
    }
    const Vec bias = args.bias == nullptr ? broadcast(0.0F) : load_some(args.bias + c, n);
    for (int64_t t = args.state.seq_starts[seq]; t < args.state.seq_starts[seq + 1]; ++t) {
        past[kernel - 1] = load_some(floats(args.src, t) + c, n);
        Vec sum = bias;
        for (int64_t k = 0; k < kernel; ++k) {
            sum = fma(weight[k], past[k], sum);
        }
        store_some(floats_of(args.dst, t) + c, activate(args.activation, sum), n);
        for (int64_t k = 0; k + 1 < kernel; ++k) {
            past[k] = past[k + 1];
        }
        if (float* place = save_place(args.state, t, c)) {
            for (int64_t k = 0; k + 1 < kernel; ++k) {
                store_some(place + k * width, past[k], n);
            }
        }
    }
    for (int64_t k = 0; k + 1 < kernel; ++k) {
        store_some(live + k * width, past[k], n);
    }
}

// One token of one head: state = decay * state + (dt * B) x, y = C · state + d * x.
void ssd_token(const SsdArgs& args, float* state, int64_t token, int64_t head) {
    const int64_t dim = args.head_dim;
    const int64_t size = args.state_size;
    const float* x = floats(args.xbc, token) + head * dim;
    const float* b =
        floats(args.xbc, token) + args.heads * dim + head / (args.heads / args.groups) * size;
    const float* c = b + args.groups * size;
    float* y = floats_of(args.dst, token) + head * dim;
    const float raw = softplus(floats(args.dt, token)[head] + args.dt_bias[head]);
    const float dt = std::min(std::max(raw, args.dt_min), args.dt_max);
    const Vec decay = broadcast(exp_of_one(args.a[head] * dt));
    const Vec skip = broadcast(args.d[head]);
    for (int64_t first = 0; first < dim; first += kBlock * kLanes) {
        const int64_t rest = dim - first;
        const int64_t num = std::min(kBlock, (rest + kLanes - 1) / kLanes);
        Vec in[kBlock];
        Vec out[kBlock];
        for (int64_t v = 0; v < num; ++v) {
            in[v] = load_some(x + first + v * kLanes, rest - v * kLanes);
            out[v] = broadcast(0.0F);
        }
        for (int64_t n = 0; n < size; ++n) {
            const Vec gain = broadcast(dt * b[n]);
            const Vec weight = broadcast(c[n]);
            float* row = state + n * dim + first;
            for (int64_t v = 0; v < num; ++v) {
                const int64_t left = rest - v * kLanes;
                const Vec old = load_some(row + v * kLanes, left);
                const Vec now = fma(gain, in[v], decay * old);
                store_some(row + v * kLanes, now, left);
                out[v] = fma(weight, now, out[v]);
            }
        }
        for (int64_t v = 0; v < num; ++v) {
            store_some(y + first + v * kLanes, fma(skip, in[v], out[v]), rest - v * kLanes);
        }
    }
}

// x / |x|, times `scale`.
void normalise(const float* x, float* to, int64_t count, float scale) {
    Vec squares = broadcast(0.0F);
    for (int64_t i = 0; i < count; i += kLanes) {
        const Vec v = load_some(x + i, count - i);
        squares = fma(v, v, squares);
    }
    const Vec factor = broadcast(scale / std::sqrt(reduce_add(squares) + 1e-6F));
    for (int64_t i = 0; i < count; i += kLanes) {
        store_some(to + i, load_some(x + i, count - i) * factor, count - i);
    }
}

// One token of one value head: what the decayed state has for k is corrected towards v by beta;
// then q reads it.
void delta_token(const DeltaArgs& args, float* state, int64_t token, int64_t head) {
    const int64_t keys = args.key_dim;
    const int64_t dim = args.value_dim;
    const float* row = floats(args.qkv, token);
    const int64_t key_head = head / (args.value_heads / args.key_heads);
    float q[kMaxKeyDim];
    float k[kMaxKeyDim];
    normalise(row + key_head * keys, q, keys, 1.0F / std::sqrt(static_cast<float>(keys)));
    normalise(row + (args.key_heads + key_head) * keys, k, keys, 1.0F);
    const float* value = row + 2 * args.key_heads * keys + head * dim;
    const float* gates = floats(args.gates, token);
    const Vec beta = broadcast(sigmoid_of(gates[head]));
    const float dt = softplus(gates[args.value_heads + head] + args.dt_bias[head]);
    const Vec decay = broadcast(exp_of_one(args.a[head] * dt));
    float* y = floats_of(args.dst, token) + head * dim;
    for (int64_t first = 0; first < dim; first += kBlock * kLanes) {
        const int64_t rest = dim - first;
        const int64_t num = std::min(kBlock, (rest + kLanes - 1) / kLanes);
        Vec sum[kBlock];
        Vec delta[kBlock];
        for (int64_t v = 0; v < num; ++v) {
            sum[v] = broadcast(0.0F);
        }
        for (int64_t i = 0; i < keys; ++i) {
            const Vec key = broadcast(k[i]);
            for (int64_t v = 0; v < num; ++v) {
                const float* at = state + i * dim + first + v * kLanes;
                sum[v] = fma(key, load_some(at, rest - v * kLanes), sum[v]);
            }
        }
        for (int64_t v = 0; v < num; ++v) {
            const Vec wanted = load_some(value + first + v * kLanes, rest - v * kLanes);
            delta[v] = (wanted - decay * sum[v]) * beta;
            sum[v] = broadcast(0.0F);
        }
        for (int64_t i = 0; i < keys; ++i) {
            const Vec key = broadcast(k[i]);
            const Vec query = broadcast(q[i]);
            for (int64_t v = 0; v < num; ++v) {
                float* at = state + i * dim + first + v * kLanes;
                const int64_t left = rest - v * kLanes;
                const Vec now = fma(key, delta[v], decay * load_some(at, left));
                store_some(at, now, left);
                sum[v] = fma(query, now, sum[v]);
            }
        }
        for (int64_t v = 0; v < num; ++v) {
            store_some(y + first + v * kLanes, sum[v], rest - v * kLanes);
        }
    }
}

// Columns [col, col + n): h = exp(a dt) h + (dt x) B, y = C · h + d x.
void scan_columns(const SelectiveArgs& args, int64_t seq, int64_t col, int64_t n) {
    const int64_t width = args.dst.cols;
    const int64_t place = args.state_offset + col;
    float* live = args.state.at(args.state.slots[seq]) + place;
    if (args.state.is_new(seq)) {
        for (int64_t i = 0; i < args.state_size; ++i) {
            store_some(live + i * width, broadcast(0.0F), n);
        }
    }
    const Vec bias = load_some(args.dt_bias + col, n);
    const Vec skip = load_some(args.d + col, n);
    for (int64_t t = args.state.seq_starts[seq]; t < args.state.seq_starts[seq + 1]; ++t) {
        const Vec x = load_some(floats(args.x, t) + col, n);
        const Vec dt = softplus(load_some(floats(args.dt, t) + col, n) + bias);
        const Vec in = dt * x;
        const float* b = floats(args.b, t);
        const float* c = floats(args.c, t);
        float* saved = save_place(args.state, t, place);
        Vec sum = skip * x;
        for (int64_t i = 0; i < args.state_size; ++i) {
            float* at = live + i * width;
            const Vec decay = exp(load_some(args.a + i * width + col, n) * dt);
            const Vec now = fma(in, broadcast(b[i]), decay * load_some(at, n));
            store_some(at, now, n);
            if (saved != nullptr) {
                store_some(saved + i * width, now, n);
            }
            sum = fma(broadcast(c[i]), now, sum);
        }
        store_some(floats_of(args.dst, t) + col, sum, n);
    }
}

// A head's tokens in their order, over its [rows, columns] of the state.
template <class Args, class Token>
void scan_heads(const Args& args, int64_t begin, int64_t end, int64_t head_values, Token token) {
    const int64_t heads = args.units();
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t seq = unit / heads;
        const int64_t head = unit % heads;
        const int64_t offset = args.state_offset + head * head_values;
        float* state = begin_state(args.state, seq, offset, head_values);
        for (int64_t t = args.state.seq_starts[seq]; t < args.state.seq_starts[seq + 1]; ++t) {
            token(args, state, t, head);
            save_state(args.state, t, offset, state, head_values);
        }
    }
}

// A sequence's columns in blocks, of which each is a unit, and in them a vector at a time.
template <class Args, class Columns>
void for_columns(const Args& args, int64_t begin, int64_t end, Columns columns) {
    const int64_t blocks = args.units();
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t first = unit % blocks * kConvChannels;
        const int64_t last = std::min(first + kConvChannels, args.dst.cols);
        for (int64_t c = first; c < last; c += kLanes) {
            columns(args, unit / blocks, c, last - c);
        }
    }
}

}  // namespace

void short_conv(const ConvArgs& args, int64_t begin, int64_t end) {
    for_columns(args, begin, end, convolve);
}

void ssd_scan(const SsdArgs& args, int64_t begin, int64_t end) {
    scan_heads(args, begin, end, args.state_size * args.head_dim, ssd_token);
}

void delta_rule(const DeltaArgs& args, int64_t begin, int64_t end) {
    scan_heads(args, begin, end, args.key_dim * args.value_dim, delta_token);
}

void selective_scan(const SelectiveArgs& args, int64_t begin, int64_t end) {
    for_columns(args, begin, end, scan_columns);
}

void group_norm(const GroupNormArgs& args, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        for (int64_t c = 0; c < args.src.cols; c += args.size) {
            const float* x = floats(args.src, r) + c;
            const float* weight = args.weight + (args.is_shared ? 0 : c);
            float* to = floats_of(args.dst, r) + c;
            const Vec factor = broadcast(inverse_rms(x, args.size, args.eps));
            for (int64_t i = 0; i < args.size; i += kLanes) {
                const int64_t n = args.size - i;
                store_some(to + i, load_some(x + i, n) * factor * load_some(weight + i, n), n);
            }
        }
    }
}

}  // namespace octavo::cpu::OCTAVO_ISA
