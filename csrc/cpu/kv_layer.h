// How one layer of the KV cache lies in memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace octavo::cpu {

constexpr int64_t kBlockTokens = 16;
constexpr int64_t kMaxHeadDim = 1024;

// The 8-bit formats hold a token's K, and its V, of one head as bytes with one scale, such that the
// row's largest magnitude is the format's largest.
enum class KVFormat : uint8_t { F32, BF16, Int8, E4M3, E5M2 };

// One layer of the KV cache. A block is, for each KV head, a K panel (16 tokens are its rows),
// head_dim / 16 V panels (16 columns of V are the rows, 16 tokens the columns) and, in 8 bits, the
// scales of K and of V, 16 bf16 each: a cache line. Panels are made of words of 4 bytes: as many
// neighbouring columns of one row as go into one, then the next row's.
//
// A latent layer has one head and no V panels: a token's values are the first columns of its key.
struct KVLayer {
    std::byte* data = nullptr;
    int64_t num_kv_heads = 0;
    int64_t head_dim = 0;
    KVFormat format = KVFormat::F32;
    int64_t stride = 0;       // bytes from one block to the next, at least block_bytes()
    int64_t latent_rank = 0;  // columns of a key that are its values; 0: V has panels of its own

    OCTAVO_INLINE bool is_scaled() const { return format >= KVFormat::Int8; }
    OCTAVO_INLINE int64_t element_bytes() const {
        return is_scaled() ? 1 : format == KVFormat::BF16 ? 2 : 4;
    }
    OCTAVO_INLINE bool is_latent() const { return latent_rank > 0; }
    OCTAVO_INLINE int64_t value_dim() const { return is_latent() ? latent_rank : head_dim; }
    OCTAVO_INLINE int64_t panels_bytes() const {  // K, or V
        return head_dim * kBlockTokens * element_bytes();
    }
    OCTAVO_INLINE int64_t head_bytes() const {
        return (is_latent() ? 1 : 2) * panels_bytes() + (is_scaled() ? 2 * kBlockTokens * 2 : 0);
    }
    OCTAVO_INLINE int64_t block_bytes() const { return num_kv_heads * head_bytes(); }

    OCTAVO_INLINE std::byte* keys(int64_t block, int64_t head) const {
        return data + block * stride + head * head_bytes();
    }
    OCTAVO_INLINE std::byte* values(int64_t block, int64_t head) const {
        return keys(block, head) + panels_bytes();
    }
    OCTAVO_INLINE uint16_t* key_scales(int64_t block, int64_t head) const {
        return reinterpret_cast<uint16_t*>(keys(block, head) + 2 * panels_bytes());
    }
    OCTAVO_INLINE uint16_t* value_scales(int64_t block, int64_t head) const {
        return key_scales(block, head) + kBlockTokens;
    }
};

// Where element `d` of a token's key and value lies within keys() and values(), counted in
// elements.
OCTAVO_INLINE int64_t key_index(int64_t element_bytes, int64_t token, int64_t d) {
    const int64_t n = 4 / element_bytes;
    return (d / n * kBlockTokens + token) * n + d % n;
}
OCTAVO_INLINE int64_t value_index(int64_t element_bytes, int64_t token, int64_t d) {
    const int64_t n = 4 / element_bytes;
    const int64_t panel = d / 16 * 16 * kBlockTokens;
    return panel + (token / n * 16 + d % 16) * n + token % n;
}

}  // namespace octavo::cpu
