// How one step's attention is cut into work items. The cut never changes a bit of the result.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/kernels.h"
#include "step.h"

namespace octavo {

// What the cut depends on; layers that agree in it share a plan.
struct AttentionShape {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t window;
    bool is_causal = true;
    int64_t group = 0;         // whose block tables say where the keys and values lie
    int64_t cross_length = 0;  // so many keys of the sequence's slot in the cross cache; 0: its own
    bool is_chunked = false;   // the window begins where chunks of its length do
    bool is_segmented = false;  // a token sees its segment of the step

    bool operator==(const AttentionShape&) const = default;
};

class AttentionPlan {
  public:
    explicit AttentionPlan(const AttentionShape& shape) : shape_(shape) {}

    const AttentionShape& shape() const { return shape_; }
    const std::vector<cpu::QueryTile>& tiles() const { return tiles_; }
    const std::vector<cpu::AttendItem>& items() const { return items_; }
    bool has_states() const { return !states_.empty(); }
    // Those of the item's first tile of softmax, where there is no window.
    cpu::NextKeys first_keys(const cpu::AttendItem& item) const;

    // Plans a step for so many threads. `memory` is for the states of what is to be merged:
    // contexts are split where threads would else be idle, and sequences that hold a partition in
    // common attend to it together; neither where there is no room for their states.
    void build(const Step& step, int64_t num_threads, float* memory, int64_t max_floats);

  private:
    // Sequences that hold the same blocks of a partition and see all of it, each by its first tile:
    // that of its first KV head.
    struct Common {
        int64_t partition;
        std::vector<int32_t> first_tiles;
    };

    // Some neighbouring tokens of the step.
    struct Tokens {
        int64_t begin;
        int64_t end;
    };

    void add_tiles(const Step& step, int64_t seq);
    void add_tiles_of(const Step& step, int64_t seq, Tokens tokens, bool is_segment);
    void find_common();
    void find_common_from(int64_t partition, std::vector<int32_t> first_tiles);
    void choose_split(int64_t num_threads, int64_t max_floats);
    bool fits(int64_t max_floats) const;
    void place_states(float* memory);
    float* place_common(const Common& common, float* memory);
    void add_shared_tile(cpu::QueryTile tile, int64_t partition, std::span<const int32_t> tokens);
    cpu::SoftmaxState& state_of(const cpu::QueryTile& tile, int64_t partition);
    int64_t rows_of(int64_t num_tokens) const;

    AttentionShape shape_;
    std::vector<cpu::QueryTile> tiles_;  // those of the sequences, then the shared ones
    std::vector<cpu::AttendItem> items_;
    std::vector<Common> common_;
    std::vector<char> is_split_;  // of the sequences' tiles
    std::vector<cpu::SoftmaxState> states_;
    std::vector<int32_t> shared_tokens_;
};

}  // namespace octavo
