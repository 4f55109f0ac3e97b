#include "kv_cache.h"

#include <cstring>

#include "common/check.h"

namespace octavo {

using cpu::kBlockTokens;
using cpu::kPanelRows;

namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 46;

// Where element `d` of a token's key and value lie within their panels, counted in elements.
int64_t key_index(Dtype dtype, int64_t token, int64_t d) {
    return dtype == Dtype::F32 ? d * kBlockTokens + token
                               : (d / 2 * kBlockTokens + token) * 2 + d % 2;
}

int64_t value_index(Dtype dtype, int64_t token, int64_t d) {
    const int64_t panel = d / kPanelRows * kPanelRows * kBlockTokens;
    const int64_t lane = d % kPanelRows;
    return panel + (dtype == Dtype::F32 ? token * kPanelRows + lane
                                        : (token / 2 * kPanelRows + lane) * 2 + token % 2);
}

void copy_element(std::byte* to, const std::byte* from, int64_t index, Dtype dtype) {
    const auto size = static_cast<size_t>(size_of(dtype));
    const auto offset = static_cast<size_t>(index) * size;
    std::memcpy(to + offset, from + offset, size);
}

float read_element(const std::byte* from, int64_t index, Dtype dtype) {
    return dtype == Dtype::F32 ? reinterpret_cast<const float*>(from)[index]
                               : bf16_to_float(reinterpret_cast<const uint16_t*>(from)[index]);
}

}  // namespace

KVCache::KVCache(int64_t num_layers, int64_t num_blocks, int64_t num_kv_heads, int64_t head_dim,
                 Dtype dtype)
    : num_layers_(num_layers),
      num_blocks_(num_blocks),
      num_kv_heads_(num_kv_heads),
      head_dim_(head_dim),
      dtype_(dtype) {
    constexpr int64_t kMax = int64_t{1} << 27;  // a slot, block * 16 + offset, is an int32
    check(num_layers >= 1 && num_layers < 65536, "KVCache: num_layers is ", num_layers);
    check(num_blocks >= 1 && num_blocks < kMax, "KVCache: num_blocks is ", num_blocks,
          "; it must be between 1 and ", kMax - 1);
    check(num_kv_heads >= 1 && num_kv_heads < 65536, "KVCache: num_kv_heads is ", num_kv_heads);
    check(head_dim >= 16 && head_dim <= cpu::kMaxHeadDim && head_dim % 16 == 0,
          "KVCache: head_dim is ", head_dim, "; it must be a multiple of 16 up to ",
          cpu::kMaxHeadDim);
    check(bytes_per_block() <= kMaxBytes / num_blocks, "KVCache: ", num_blocks, " blocks of ",
          bytes_per_block(), " bytes are more than any machine has");
    memory_ = Memory(bytes_per_block() * num_blocks);
}

cpu::KVLayer KVCache::layer(int64_t index) const {
    cpu::KVLayer layer{nullptr, num_kv_heads_, head_dim_, dtype_};
    layer.data = memory_.data() + index * num_blocks_ * layer.block_bytes();
    return layer;
}

void KVCache::check_block(const char* what, int64_t block) const {
    check(block >= 0 && block < num_blocks_, what, ": block ", block, " of a cache of ",
          num_blocks_, " blocks");
}

void KVCache::copy(int64_t source, int64_t target, int64_t num_tokens) {
    check_block("copy", source);
    check_block("copy", target);
    check(num_tokens >= 0 && num_tokens <= kBlockTokens, "copy: ", num_tokens,
          " tokens of a block of ", kBlockTokens);
    if (source == target) {
        return;
    }
    for (int64_t l = 0; l < num_layers_; ++l) {
        const cpu::KVLayer kv = layer(l);
        if (num_tokens == kBlockTokens) {
            std::memcpy(kv.keys(target, 0), kv.keys(source, 0),
                        static_cast<size_t>(kv.block_bytes()));
            continue;
        }
        for (int64_t head = 0; head < num_kv_heads_; ++head) {
            for (int64_t d = 0; d < head_dim_; ++d) {
                for (int64_t t = 0; t < num_tokens; ++t) {
                    copy_element(kv.keys(target, head), kv.keys(source, head),
                                 key_index(dtype_, t, d), dtype_);
                    copy_element(kv.values(target, head), kv.values(source, head),
                                 value_index(dtype_, t, d), dtype_);
                }
            }
        }
    }
}

void KVCache::poison(int64_t block) {
    check_block("poison", block);
    for (int64_t l = 0; l < num_layers_; ++l) {
        const cpu::KVLayer kv = layer(l);  // all ones are a NaN in f32 and in bf16
        std::memset(kv.keys(block, 0), 0xff, static_cast<size_t>(kv.block_bytes()));
    }
}

void KVCache::read(int64_t layer_index, int64_t block, float* keys, float* values) const {
    check(layer_index >= 0 && layer_index < num_layers_, "read: layer ", layer_index, " of ",
          num_layers_);
    check_block("read", block);
    const cpu::KVLayer kv = layer(layer_index);
    for (int64_t head = 0; head < num_kv_heads_; ++head) {
        for (int64_t t = 0; t < kBlockTokens; ++t) {
            for (int64_t d = 0; d < head_dim_; ++d) {
                const int64_t at = (head * kBlockTokens + t) * head_dim_ + d;
                keys[at] = read_element(kv.keys(block, head), key_index(dtype_, t, d), dtype_);
                values[at] =
                    read_element(kv.values(block, head), value_index(dtype_, t, d), dtype_);
            }
        }
    }
}

}  // namespace octavo
