#include "cpu/heads.h"

#include "cpu/norm.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// to = from, normed if there is a weight; then rotated: pairs (i, i + rotary_dim / 2).
void norm_and_rotate(const AttentionArgs& args, const float* from, const float* weight,
                     int64_t position, float* to) {
    const int64_t dim = args.kv.head_dim;
    if (weight == nullptr) {
        for (int64_t i = 0; i < dim; i += kLanes) {
            store(to + i, load(from + i));
        }
    } else {
        const Vec factor = broadcast(inverse_rms(from, dim, args.norm_eps));
        for (int64_t i = 0; i < dim; i += kLanes) {
            store(to + i, load(from + i) * factor * load(weight + i));
        }
    }
    const int64_t half = args.rotary_dim / 2;
    const float* cos = args.cos_sin + position * args.rotary_dim;
    const float* sin = cos + half;
    for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t n = half - i;
        const Vec c = load_some(cos + i, n);
        const Vec s = load_some(sin + i, n);
        const Vec x = load_some(to + i, n);
        const Vec y = load_some(to + half + i, n);
        store_some(to + i, x * c - y * s, n);
        store_some(to + half + i, y * c + x * s, n);
    }
}

void write_key(const KVLayer& kv, int64_t slot, int64_t head, const float* key) {
    std::byte* panel = kv.keys(slot / kBlockTokens, head);
    const int64_t token = slot % kBlockTokens;
    if (kv.dtype == Dtype::F32) {
        auto* values = reinterpret_cast<float*>(panel);
        for (int64_t d = 0; d < kv.head_dim; ++d) {
            values[d * kBlockTokens + token] = key[d];
        }
        return;
    }
    auto* values = reinterpret_cast<uint16_t*>(panel);
    for (int64_t d = 0; d < kv.head_dim; ++d) {
        values[(d / 2 * kBlockTokens + token) * 2 + d % 2] = float_to_bf16(key[d]);
    }
}

void write_value(const KVLayer& kv, int64_t slot, int64_t head, const float* value) {
    std::byte* panels = kv.values(slot / kBlockTokens, head);
    const int64_t token = slot % kBlockTokens;
    for (int64_t c = 0; c < kv.head_dim; c += kPanelRows) {
        if (kv.dtype == Dtype::F32) {
            auto* row = reinterpret_cast<float*>(panels) + c * kBlockTokens + token * kPanelRows;
            store(row, load(value + c));
            continue;
        }
        auto* pairs = reinterpret_cast<uint16_t*>(panels) + c * kBlockTokens +
                      token / 2 * kPanelRows * 2 + token % 2;
        for (int64_t i = 0; i < kPanelRows; ++i) {
            pairs[i * 2] = float_to_bf16(value[c + i]);
        }
    }
}

}  // namespace

void prepare_heads(const AttentionArgs& args, int64_t begin, int64_t end) {
    const int64_t dim = args.kv.head_dim;
    const int64_t num_heads = args.num_heads;
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t token = unit / args.head_units();
        const int64_t index = unit % args.head_units();
        const auto* qkv = reinterpret_cast<const float*>(args.qkv.row(token));
        const int64_t position = args.positions[token];
        if (index < num_heads) {
            float* q = args.q + (token * num_heads + index) * dim;
            norm_and_rotate(args, qkv + index * dim, args.q_norm, position, q);
            continue;
        }
        const int64_t head = index - num_heads;
        const float* k = qkv + (num_heads + head) * dim;
        const float* v = k + args.kv.num_kv_heads * dim;
        float rotated[kMaxHeadDim];
        norm_and_rotate(args, k, args.k_norm, position, rotated);
        write_key(args.kv, args.slots[token], head, rotated);
        write_value(args.kv, args.slots[token], head, v);
    }
}

}  // namespace octavo::cpu::OCTAVO_ISA
