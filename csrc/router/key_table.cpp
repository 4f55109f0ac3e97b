#include "router/key_table.h"

#include <algorithm>
#include <utility>

namespace octavo::router {

namespace {

constexpr uint32_t kSmallest = 16;

// At most 4 of 5 entries are taken; growth by a quarter keeps at least 3 of 5.
constexpr bool is_full(uint32_t size, uint32_t capacity) {
    return uint64_t{size} * 5 >= uint64_t{capacity} * 4;
}

}  // namespace

const uint64_t* KeyTable::find(uint64_t hash) const {
    if (capacity_ == 0) {
        return nullptr;
    }
    for (uint32_t at = home_of(hash);; at = next(at)) {
        const uint64_t& entry = entries_[at];
        if (entry == 0) {
            return nullptr;
        }
        if (entry >> kTokenBits == hash) {
            return &entry;
        }
    }
}

void KeyTable::prefetch(uint64_t hash) const {
    if (capacity_ != 0) {
        __builtin_prefetch(&entries_[home_of(hash)]);
    }
}

bool KeyTable::put(uint64_t hash, uint32_t tokens) {
    if (is_full(size_, capacity_)) {
        resize(std::max(kSmallest, capacity_ + capacity_ / 4 + 1));
    }
    const uint64_t entry = hash << kTokenBits | (std::min(tokens, kMaxTokens) + 1);
    uint32_t at = home_of(hash);
    for (; entries_[at] != 0; at = next(at)) {
        if (entries_[at] >> kTokenBits == hash) {
            entries_[at] = entry;
            return false;
        }
    }
    entries_[at] = entry;
    ++size_;
    return true;
}

// What follows moves up where that brings it nearer to its home: no gravestones stay behind.
bool KeyTable::erase(uint64_t hash) {
    const uint64_t* found = find(hash);
    if (found == nullptr) {
        return false;
    }
    auto hole = static_cast<uint32_t>(found - entries_.get());
    for (uint32_t at = next(hole); entries_[at] != 0; at = next(at)) {
        const uint32_t home = home_of(entries_[at] >> kTokenBits);
        const bool is_home_between =
            hole <= at ? hole < home && home <= at : hole < home || home <= at;
        if (!is_home_between) {
            entries_[hole] = entries_[at];
            hole = at;
        }
    }
    entries_[hole] = 0;
    --size_;
    if (size_ == 0) {
        *this = KeyTable();
    } else if (capacity_ > 4 * kSmallest && size_ < capacity_ / 4) {
        resize(capacity_ / 2);
    }
    return true;
}

void KeyTable::resize(uint32_t capacity) {
    KeyTable grown;
    grown.entries_ = std::make_unique<uint64_t[]>(capacity);
    grown.capacity_ = capacity;
    for (uint32_t at = 0; at < capacity_; ++at) {
        const uint64_t entry = entries_[at];
        if (entry != 0) {
            uint32_t place = grown.home_of(entry >> kTokenBits);
            while (grown.entries_[place] != 0) {
                place = grown.next(place);
            }
            grown.entries_[place] = entry;
        }
    }
    grown.size_ = size_;
    *this = std::move(grown);
}

void KeySet::put(uint64_t hash, uint32_t tokens) {
    if (tables_.empty()) {
        tables_.resize(kNumTables);
    }
    size_ += tables_[hash >> kTableShift].put(inner(hash), tokens) ? 1 : 0;
}

bool KeySet::erase(uint64_t hash) {
    if (size_ == 0 || !tables_[hash >> kTableShift].erase(inner(hash))) {
        return false;
    }
    --size_;
    return true;
}

size_t KeySet::memory_bytes() const {
    size_t bytes = tables_.capacity() * sizeof(KeyTable);
    for (const KeyTable& table : tables_) {
        bytes += table.capacity() * sizeof(uint64_t);
    }
    return bytes;
}

}  // namespace octavo::router
