// Messages from rank 0 to all other ranks of a host, in order, through memory that they share.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/memory.h"
#include "common/patience.h"
#include "common/ranks.h"

namespace octavo {

class Ring {
  public:
    static constexpr int kSlots = 4;

    // `file` is memory that all ranks map, all zero at first; messages have up to `max_bytes`.
    Ring(int rank, int size, int file, int64_t max_bytes);

    // By rank 0. Waits while a rank has all slots to read yet; false when it did not read one
    // within `patience_s`. Throws ValueError where the message is too long.
    bool put(std::span<const std::byte> message, double patience_s);

    // By the others: the next message, once it is there; nothing if none has come within
    // `patience_s`. Throws ValueError where its length cannot be.
    std::optional<std::vector<std::byte>> take(double patience_s);

    // After `put` returned false: the rank that reads nothing.
    int slowest() const;

  private:
    struct Shared;

    uint32_t unread(int rank) const;
    std::byte* slot(uint32_t number) const;

    const int rank_;
    const int size_;
    const int64_t max_bytes_;
    int64_t slot_bytes_;
    Memory memory_;
    Shared* shared_;
    Patience patience_;
};

}  // namespace octavo
