// K and V of all layers, in blocks of 16 tokens; memory is real only once a block was written.
#pragma once

#include <cstdint>
#include <string>

#include "common/memory.h"
#include "cpu/kv_layer.h"

namespace octavo {

// Throws ValueError on a name that is not known.
cpu::KVFormat parse_kv_format(const std::string& name);

class KVCache {
  public:
    KVCache(int64_t num_layers, int64_t num_blocks, int64_t num_kv_heads, int64_t head_dim,
            cpu::KVFormat format);

    int64_t num_layers() const { return num_layers_; }
    int64_t num_blocks() const { return num_blocks_; }
    int64_t bytes_per_block() const { return num_layers_ * layer(0).block_bytes(); }
    cpu::KVLayer layer(int64_t index) const;

    // The first `num_tokens` tokens of block `source` become those of `target`, in all layers.
    void copy(int64_t source, int64_t target, int64_t num_tokens);

    // Fills a block with NaN.
    void poison(int64_t block);

    // K and V of one block, each [num_kv_heads, 16, head_dim].
    void read(int64_t layer_index, int64_t block, float* keys, float* values) const;

    // Throws ValueError unless there is such a block.
    void check_block(const char* what, int64_t block) const;

  private:
    int64_t num_layers_;
    int64_t num_blocks_;
    int64_t num_kv_heads_;
    int64_t head_dim_;
    cpu::KVFormat format_;
    Memory memory_;
};

}  // namespace octavo
