#include "state_cache.h"

#include <cstring>
#include <utility>

#include "common/check.h"

namespace octavo {

namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 46;
constexpr int64_t kMaxValues = int64_t{1} << 32;

}  // namespace

StateCache::StateCache(int64_t num_slots, std::vector<int64_t> values)
    : num_slots_(num_slots), values_(std::move(values)) {
    constexpr int64_t kMaxSlots = int64_t{1} << 24;
    check(num_slots >= 1 && num_slots < kMaxSlots, "StateCache: num_slots is ", num_slots);
    check(!values_.empty() && values_.size() < 65536, "StateCache: ", values_.size(), " layers");
    for (const int64_t count : values_) {
        check(count >= 1 && count < kMaxValues, "StateCache: a layer of ", count, " values");
        offsets_.push_back(stride_);
        stride_ += (count + 15) / 16 * 16;  // whole cache lines
    }
    check(bytes_per_slot() <= kMaxBytes / num_slots, "StateCache: ", num_slots, " slots of ",
          bytes_per_slot(), " bytes are more than any machine has");
    memory_ = Memory(bytes_per_slot() * num_slots);
}

float* StateCache::layer(int64_t index) const {
    return reinterpret_cast<float*>(memory_.data()) + offsets_[static_cast<size_t>(index)];
}

void StateCache::check_slot(const char* what, int64_t slot) const {
    check(slot >= 0 && slot < num_slots_, what, ": slot ", slot, " of ", num_slots_);
}

void StateCache::copy(int64_t source, int64_t target) {
    check_slot("copy", source);
    check_slot("copy", target);
    if (source != target) {
        const auto bytes = static_cast<size_t>(bytes_per_slot());
        std::memcpy(memory_.data() + target * bytes_per_slot(),
                    memory_.data() + source * bytes_per_slot(), bytes);
    }
}

void StateCache::save(int64_t slot, std::byte* page) const {
    check_slot("save", slot);
    std::memcpy(page, memory_.data() + slot * bytes_per_slot(),
                static_cast<size_t>(bytes_per_slot()));
}

void StateCache::load(int64_t slot, const std::byte* page) {
    check_slot("load", slot);
    std::memcpy(memory_.data() + slot * bytes_per_slot(), page,
                static_cast<size_t>(bytes_per_slot()));
}

void StateCache::poison(int64_t slot) {
    check_slot("poison", slot);
    std::memset(memory_.data() + slot * bytes_per_slot(), 0xff,
                static_cast<size_t>(bytes_per_slot()));
}

}  // namespace octavo
