// How one step's attention is cut into work items. The cut never changes a bit of the result.
#pragma once

#include <cstdint>
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

    bool operator==(const AttentionShape&) const = default;
};

class AttentionPlan {
  public:
    explicit AttentionPlan(const AttentionShape& shape) : shape_(shape) {}

    const AttentionShape& shape() const { return shape_; }
    const std::vector<cpu::QueryTile>& tiles() const { return tiles_; }
    const std::vector<cpu::AttendItem>& items() const { return items_; }
    bool has_partials() const { return has_partials_; }

    // Plans a step for so many threads. Long contexts are split where threads would else be idle
    // and `partials` has room for what is to be joined.
    void build(const Step& step, int64_t num_threads, float* partials, int64_t max_floats);

  private:
    void add_tiles(const Step& step, int64_t seq);
    void split_contexts(float* partials);
    int64_t partial_floats(const cpu::QueryTile& tile) const;

    AttentionShape shape_;
    std::vector<cpu::QueryTile> tiles_;
    std::vector<cpu::AttendItem> items_;
    bool has_partials_ = false;
};

}  // namespace octavo
