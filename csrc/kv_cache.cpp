#include "kv_cache.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "common/check.h"
#include "cpu/fp8.h"

namespace octavo {

using cpu::kBlockTokens;
using cpu::KVFormat;

namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 46;

float widen(KVFormat format, const std::byte* panels, int64_t index, uint16_t scale) {
    const auto byte = std::to_integer<uint8_t>(panels[index]);
    switch (format) {
        case KVFormat::F32:
            return reinterpret_cast<const float*>(panels)[index];
        case KVFormat::BF16:
            return bf16_to_float(reinterpret_cast<const uint16_t*>(panels)[index]);
        case KVFormat::Int8:
            return static_cast<float>(static_cast<int8_t>(byte)) * bf16_to_float(scale);
        case KVFormat::E4M3:
            return cpu::E4M3::widen(byte) * bf16_to_float(scale);
        case KVFormat::E5M2:
            return cpu::E5M2::widen(byte) * bf16_to_float(scale);
    }
    return 0.0F;
}

}  // namespace

KVFormat parse_kv_format(const std::string& name) {
    constexpr std::array<std::pair<const char*, KVFormat>, 5> known{{{"f32", KVFormat::F32},
                                                                     {"bf16", KVFormat::BF16},
                                                                     {"int8", KVFormat::Int8},
                                                                     {"fp8_e4m3", KVFormat::E4M3},
                                                                     {"fp8_e5m2", KVFormat::E5M2}}};
    for (const auto& [known_name, format] : known) {
        if (name == known_name) {
            return format;
        }
    }
    fail("KVCache: dtype '", name, "' is not known; there are: f32, bf16, int8, fp8_e4m3, ",
         "fp8_e5m2");
}

KVCache::KVCache(int64_t num_layers, int64_t num_blocks, int64_t num_kv_heads, int64_t head_dim,
                 KVFormat format)
    : num_layers_(num_layers),
      num_blocks_(num_blocks),
      num_kv_heads_(num_kv_heads),
      head_dim_(head_dim),
      format_(format) {
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
    cpu::KVLayer layer{nullptr, num_kv_heads_, head_dim_, format_};
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
        const int64_t size = kv.element_bytes();
        const auto copy_element = [size](std::byte* to, const std::byte* from, int64_t index) {
            std::memcpy(to + index * size, from + index * size, static_cast<size_t>(size));
        };
        for (int64_t head = 0; head < num_kv_heads_; ++head) {
            for (int64_t d = 0; d < head_dim_; ++d) {
                for (int64_t t = 0; t < num_tokens; ++t) {
                    copy_element(kv.keys(target, head), kv.keys(source, head),
                                 cpu::key_index(size, t, d));
                    copy_element(kv.values(target, head), kv.values(source, head),
                                 cpu::value_index(size, t, d));
                }
            }
            if (kv.is_scaled()) {
                std::copy_n(kv.key_scales(source, head), num_tokens, kv.key_scales(target, head));
                std::copy_n(kv.value_scales(source, head), num_tokens,
                            kv.value_scales(target, head));
            }
        }
    }
}

void KVCache::poison(int64_t block) {
    check_block("poison", block);
    for (int64_t l = 0; l < num_layers_; ++l) {
        const cpu::KVLayer kv = layer(l);  // all ones are a NaN in f32, bf16 and scales
        std::memset(kv.keys(block, 0), 0xff, static_cast<size_t>(kv.block_bytes()));
    }
}

void KVCache::read(int64_t layer_index, int64_t block, float* keys, float* values) const {
    check(layer_index >= 0 && layer_index < num_layers_, "read: layer ", layer_index, " of ",
          num_layers_);
    check_block("read", block);
    const cpu::KVLayer kv = layer(layer_index);
    const int64_t size = kv.element_bytes();
    for (int64_t head = 0; head < num_kv_heads_; ++head) {
        for (int64_t t = 0; t < kBlockTokens; ++t) {
            const bool is_scaled = kv.is_scaled();
            const uint16_t key_scale = is_scaled ? kv.key_scales(block, head)[t] : uint16_t{0};
            const uint16_t value_scale = is_scaled ? kv.value_scales(block, head)[t] : uint16_t{0};
            for (int64_t d = 0; d < head_dim_; ++d) {
                const int64_t at = (head * kBlockTokens + t) * head_dim_ + d;
                keys[at] =
                    widen(format_, kv.keys(block, head), cpu::key_index(size, t, d), key_scale);
                values[at] = widen(format_, kv.values(block, head), cpu::value_index(size, t, d),
                                   value_scale);
            }
        }
    }
}

}  // namespace octavo
