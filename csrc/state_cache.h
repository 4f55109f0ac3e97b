// Recurrent states: slots that each hold the states of all layers that have one, in float32.
//
// A running sequence has a slot of its own; the others hold snapshots. Memory is real only once a
// slot was written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/memory.h"

namespace octavo {

class StateCache {
  public:
    // `values`: of each layer with a state, how many floats it is.
    StateCache(int64_t num_slots, std::vector<int64_t> values);

    int64_t num_slots() const { return num_slots_; }
    int64_t num_layers() const { return static_cast<int64_t>(values_.size()); }
    int64_t values(int64_t layer) const { return values_[static_cast<size_t>(layer)]; }
    int64_t bytes_per_slot() const { return stride_ * 4; }
    int64_t stride() const { return stride_; }  // floats from slot to slot
    // Of slot 0.
    float* layer(int64_t index) const;

    void copy(int64_t source, int64_t target);

    // All bytes of a slot, `bytes_per_slot` of them, out and back in.
    void save(int64_t slot, std::byte* page) const;
    void load(int64_t slot, const std::byte* page);

    // Fills a slot with NaN.
    void poison(int64_t slot);

    // Throws ValueError unless there is such a slot.
    void check_slot(const char* what, int64_t slot) const;

  private:
    int64_t num_slots_;
    std::vector<int64_t> values_;
    std::vector<int64_t> offsets_;
    int64_t stride_ = 0;
    Memory memory_;
};

}  // namespace octavo
