#include "common/ring.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>

#include "common/check.h"
#include "common/futex.h"
#include "common/machine.h"
#include "common/spin.h"

namespace octavo {

namespace {

constexpr double kParkNs = 1e9;
constexpr int64_t kLengthBytes = 64;  // before each message: its length, in a line of its own
constexpr int64_t kMaxBytes = int64_t{1} << 40;

}  // namespace

// Zeroed memory is a valid one.
struct Ring::Shared {
    struct alignas(64) Counter {
        std::atomic<uint32_t> count;
    };
    Counter written;
    Counter parked;  // ranks that must be woken
    std::array<Counter, kMaxRanks> read;
};

Ring::Ring(int rank, int size, int file, int64_t max_bytes)
    : rank_(rank),
      size_(size),
      max_bytes_(max_bytes),
      slot_bytes_(kLengthBytes + (max_bytes + 63) / 64 * 64),
      patience_(is_short_of_quota()) {
    check(size >= 1 && size <= kMaxRanks && rank >= 0 && rank < size, "ring: rank ", rank, " of ",
          size);
    check(max_bytes >= 1 && max_bytes <= kMaxBytes, "ring: messages of ", max_bytes, " bytes");
    memory_ = Memory::shared(file, 0, static_cast<int64_t>(sizeof(Shared)) + kSlots * slot_bytes_);
    shared_ = std::launder(reinterpret_cast<Shared*>(memory_.data()));
}

bool Ring::put(std::span<const std::byte> message, double patience_s) {
    check(rank_ == 0, "ring: rank ", rank_, " only reads");
    const auto length = static_cast<int64_t>(message.size());
    check(length <= max_bytes_, "ring: a message of ", length, " bytes; the most are ", max_bytes_);
    const int64_t begin = now_ns();
    while (unread(slowest()) >= kSlots) {
        if (static_cast<double>(now_ns() - begin) > patience_s * 1e9) {
            return false;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    const uint32_t number = shared_->written.count.load(std::memory_order_relaxed);
    std::byte* to = slot(number);
    std::memcpy(to, &length, sizeof(length));
    std::copy(message.begin(), message.end(), to + kLengthBytes);
    // Sequentially consistent, as `parked` is: either this sees who parks, or they see this.
    shared_->written.count.store(number + 1, std::memory_order_seq_cst);
    if (shared_->parked.count.load(std::memory_order_seq_cst) != 0) {
        wake(shared_->written.count);
    }
    return true;
}

std::optional<std::vector<std::byte>> Ring::take(double patience_s) {
    check(rank_ > 0, "ring: rank 0 only writes");
    std::atomic<uint32_t>& written = shared_->written.count;
    std::atomic<uint32_t>& read = shared_->read[static_cast<size_t>(rank_)].count;
    const uint32_t number = read.load(std::memory_order_relaxed);
    const int64_t begin = now_ns();
    if (!spin_while(written, number, patience_, &Patience::between_ns)) {
        shared_->parked.count.fetch_add(1, std::memory_order_seq_cst);
        double left_ns = patience_s * 1e9 - static_cast<double>(now_ns() - begin);
        while (written.load(std::memory_order_seq_cst) == number && left_ns > 0) {
            park(written, number, static_cast<int64_t>(std::min(left_ns, kParkNs)));
            left_ns = patience_s * 1e9 - static_cast<double>(now_ns() - begin);
        }
        shared_->parked.count.fetch_sub(1, std::memory_order_seq_cst);
        if (written.load(std::memory_order_seq_cst) == number) {
            return std::nullopt;
        }
    }
    patience_.saw_gap(now_ns() - begin);
    const std::byte* from = slot(number);
    int64_t length = 0;
    std::memcpy(&length, from, sizeof(length));
    check(length >= 0 && length <= max_bytes_, "ring: a message of ", length,
          " bytes; the most are ", max_bytes_);
    std::vector<std::byte> message(from + kLengthBytes, from + kLengthBytes + length);
    read.store(number + 1, std::memory_order_release);
    return message;
}

int Ring::slowest() const {
    int slowest = size_ > 1 ? 1 : 0;
    for (int rank = 2; rank < size_; ++rank) {
        slowest = unread(rank) > unread(slowest) ? rank : slowest;
    }
    return slowest;
}

uint32_t Ring::unread(int rank) const {
    return rank == 0
               ? 0
               : shared_->written.count.load(std::memory_order_relaxed) -
                     shared_->read[static_cast<size_t>(rank)].count.load(std::memory_order_acquire);
}

std::byte* Ring::slot(uint32_t number) const {
    return memory_.data() + sizeof(Shared) + number % kSlots * slot_bytes_;
}

}  // namespace octavo
