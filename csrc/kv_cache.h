// K and V of all layers, in blocks of 16 tokens; memory is real only once a block was written.
//
// Layers form groups, each with block tables of its own. A block belongs to one group at a time and
// then holds 16 tokens of that group's layers only; so layers of different groups share a region of
// the memory: [num_blocks], each as large as the largest part that one of them has of a block.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/memory.h"
#include "cpu/kv_layer.h"

namespace octavo {

// Throws ValueError on a name that is not known.
cpu::KVFormat parse_kv_format(const std::string& name);

// One layer's part of the cache; no two layers of a group share a region.
struct KVPart {
    int64_t group;
    int64_t region;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t latent_rank = 0;  // of a latent layer, which has one head
};

class KVCache {
  public:
    // `windows` has for each group how many of a sequence's last tokens its blocks hold; 0: all.
    KVCache(int64_t num_blocks, std::vector<KVPart> layers, std::vector<int64_t> windows,
            cpu::KVFormat format);

    int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
    int64_t num_groups() const { return static_cast<int64_t>(windows_.size()); }
    int64_t num_blocks() const { return num_blocks_; }
    int64_t bytes_per_block() const { return bytes_per_block_; }
    std::span<const int64_t> windows() const { return windows_; }
    int64_t group(int64_t index) const { return layers_[static_cast<size_t>(index)].group; }
    const cpu::KVLayer& layer(int64_t index) const { return views_[static_cast<size_t>(index)]; }

    // The first `num_tokens` tokens of block `source` become those of `target`, in all layers.
    void copy(int64_t source, int64_t target, int64_t num_tokens);

    // Fills a block with NaN.
    void poison(int64_t block);

    // All bytes of a block, bytes_per_block() of them, whatever they mean.
    void save(int64_t block, std::byte* to) const;
    void load(int64_t block, const std::byte* from);

    // K and V of one block, each [num_kv_heads, 16, head_dim]; of a latent layer no V.
    void read(int64_t layer_index, int64_t block, float* keys, float* values) const;

    // Throws ValueError unless there is such a block.
    void check_block(const char* what, int64_t block) const;

  private:
    struct Region {
        std::byte* data;
        int64_t stride;  // bytes of a block in it
    };

    void check_layers() const;
    void add_view(const KVPart& part);

    int64_t num_blocks_;
    std::vector<KVPart> layers_;
    std::vector<int64_t> windows_;
    cpu::KVFormat format_;
    std::vector<cpu::KVLayer> views_;  // of each layer
    std::vector<cpu::KVLayer> parts_;  // the same without those that lie and look alike
    std::vector<Region> regions_;
    int64_t bytes_per_block_ = 0;
    Memory memory_;
};

}  // namespace octavo
