#include "kv_cache.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <utility>

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

KVCache::KVCache(int64_t num_blocks, std::vector<KVPart> layers, std::vector<int64_t> windows,
                 KVFormat format)
    : num_blocks_(num_blocks),
      layers_(std::move(layers)),
      windows_(std::move(windows)),
      format_(format) {
    constexpr int64_t kMax = int64_t{1} << 27;  // a slot, block * 16 + offset, is an int32
    check(num_blocks >= 1 && num_blocks < kMax, "KVCache: num_blocks is ", num_blocks,
          "; it must be between 1 and ", kMax - 1);
    check_layers();
    for (const KVPart& part : layers_) {
        regions_.resize(std::max(regions_.size(), static_cast<size_t>(part.region) + 1));
        Region& region = regions_[static_cast<size_t>(part.region)];
        const cpu::KVLayer shape{nullptr, part.num_kv_heads, part.head_dim, format_,
                                 0,       part.latent_rank};
        region.stride = std::max(region.stride, shape.block_bytes());
    }
    for (const Region& region : regions_) {
        bytes_per_block_ += region.stride;
    }
    check(bytes_per_block_ <= kMaxBytes / num_blocks, "KVCache: ", num_blocks, " blocks of ",
          bytes_per_block_, " bytes are more than any machine has");
    memory_ = Memory(bytes_per_block_ * num_blocks);
    std::byte* data = memory_.data();
    for (Region& region : regions_) {
        region.data = data;
        data += region.stride * num_blocks;
    }
    for (const KVPart& part : layers_) {
        add_view(part);
    }
}

void KVCache::check_layers() const {
    const auto num_layers = layers_.size();
    check(num_layers >= 1 && num_layers < 65536, "KVCache: num_layers is ", num_layers);
    check(!windows_.empty(), "KVCache: there must be a group");
    for (const int64_t window : windows_) {
        check(window >= 0, "KVCache: a group's window is ", window);
    }
    std::set<std::pair<int64_t, int64_t>> taken;
    for (size_t i = 0; i < num_layers; ++i) {
        const KVPart& part = layers_[i];
        check(part.group >= 0 && part.group < num_groups(), "KVCache: layer ", i, " is of group ",
              part.group, " of ", num_groups());
        check(part.region >= 0 && part.region < static_cast<int64_t>(num_layers), "KVCache: layer ",
              i, " lies in region ", part.region);
        check(part.num_kv_heads >= 1 && part.num_kv_heads < 65536, "KVCache: num_kv_heads is ",
              part.num_kv_heads);
        check(part.head_dim >= 16 && part.head_dim <= cpu::kMaxHeadDim && part.head_dim % 16 == 0,
              "KVCache: head_dim is ", part.head_dim, "; it must be a multiple of 16 up to ",
              cpu::kMaxHeadDim);
        check(part.latent_rank == 0 ||
                  (part.num_kv_heads == 1 && part.latent_rank > 0 && part.latent_rank % 16 == 0 &&
                   part.latent_rank <= part.head_dim),
              "KVCache: latent_rank is ", part.latent_rank,
              "; it must be a multiple of 16 up to head_dim, ", part.head_dim, ", of one head");
        check(part.latent_rank == 0 || format_ == KVFormat::F32 || format_ == KVFormat::BF16,
              "KVCache: latent layers are held as f32 or bf16");
        check(taken.emplace(part.group, part.region).second, "KVCache: two layers of group ",
              part.group, " lie in region ", part.region);
    }
}

void KVCache::add_view(const KVPart& part) {
    const Region& region = regions_[static_cast<size_t>(part.region)];
    const cpu::KVLayer view{region.data, part.num_kv_heads, part.head_dim,
                            format_,     region.stride,     part.latent_rank};
    views_.push_back(view);
    const auto is_same = [&](const cpu::KVLayer& other) {
        return other.data == view.data && other.num_kv_heads == view.num_kv_heads &&
               other.head_dim == view.head_dim && other.latent_rank == view.latent_rank;
    };
    if (std::none_of(parts_.begin(), parts_.end(), is_same)) {
        parts_.push_back(view);
    }
}

void KVCache::check_block(const char* what, int64_t block) const {
    check(block >= 0 && block < num_blocks_, what, ": block ", block, " of a cache of ",
          num_blocks_, " blocks");
}

namespace {

void copy_tokens(const cpu::KVLayer& kv, int64_t source, int64_t target, int64_t num_tokens) {
    const int64_t size = kv.element_bytes();
    const auto copy_element = [size](std::byte* to, const std::byte* from, int64_t index) {
        std::memcpy(to + index * size, from + index * size, static_cast<size_t>(size));
    };
    for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
        for (int64_t d = 0; d < kv.head_dim; ++d) {
            for (int64_t t = 0; t < num_tokens; ++t) {
                copy_element(kv.keys(target, head), kv.keys(source, head),
                             cpu::key_index(size, t, d));
                if (!kv.is_latent()) {
                    copy_element(kv.values(target, head), kv.values(source, head),
                                 cpu::value_index(size, t, d));
                }
            }
        }
        if (kv.is_scaled()) {
            std::copy_n(kv.key_scales(source, head), num_tokens, kv.key_scales(target, head));
            std::copy_n(kv.value_scales(source, head), num_tokens, kv.value_scales(target, head));
        }
    }
}

}  // namespace

void KVCache::copy(int64_t source, int64_t target, int64_t num_tokens) {
    check_block("copy", source);
    check_block("copy", target);
    check(num_tokens >= 0 && num_tokens <= kBlockTokens, "copy: ", num_tokens,
          " tokens of a block of ", kBlockTokens);
    if (source == target) {
        return;
    }
    if (num_tokens == kBlockTokens) {
        for (const Region& region : regions_) {
            std::memcpy(region.data + target * region.stride, region.data + source * region.stride,
                        static_cast<size_t>(region.stride));
        }
        return;
    }
    // Whichever group the block is of: what lies where another group's tokens would is copied to
    // the same place, behind the first tokens of its own group, where nothing is valid yet.
    for (const cpu::KVLayer& part : parts_) {
        copy_tokens(part, source, target, num_tokens);
    }
}

void KVCache::poison(int64_t block) {
    check_block("poison", block);
    for (const Region& region : regions_) {  // all ones are a NaN in f32, bf16 and scales
        std::memset(region.data + block * region.stride, 0xff, static_cast<size_t>(region.stride));
    }
}

void KVCache::save(int64_t block, std::byte* to) const {
    check_block("save", block);
    for (const Region& region : regions_) {
        const auto size = static_cast<size_t>(region.stride);
        std::memcpy(to, region.data + block * region.stride, size);
        to += size;
    }
}

void KVCache::load(int64_t block, const std::byte* from) {
    check_block("load", block);
    for (const Region& region : regions_) {
        const auto size = static_cast<size_t>(region.stride);
        std::memcpy(region.data + block * region.stride, from, size);
        from += size;
    }
}

void KVCache::read(int64_t layer_index, int64_t block, float* keys, float* values) const {
    check(layer_index >= 0 && layer_index < num_layers(), "read: layer ", layer_index, " of ",
          num_layers());
    check_block("read", block);
    const cpu::KVLayer& kv = layer(layer_index);
    const int64_t size = kv.element_bytes();
    for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
        for (int64_t t = 0; t < kBlockTokens; ++t) {
            const bool is_scaled = kv.is_scaled();
            const uint16_t key_scale = is_scaled ? kv.key_scales(block, head)[t] : uint16_t{0};
            const uint16_t value_scale = is_scaled ? kv.value_scales(block, head)[t] : uint16_t{0};
            for (int64_t d = 0; d < kv.head_dim; ++d) {
                const int64_t at = (head * kBlockTokens + t) * kv.head_dim + d;
                keys[at] =
                    widen(format_, kv.keys(block, head), cpu::key_index(size, t, d), key_scale);
                if (!kv.is_latent()) {
                    values[at] = widen(format_, kv.values(block, head),
                                       cpu::value_index(size, t, d), value_scale);
                }
            }
        }
    }
}

}  // namespace octavo
