#include "router/residency.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>

namespace octavo::router {

namespace {

constexpr size_t kKeyBytes = 8;
constexpr size_t kStoredBytes = 12;
constexpr size_t kMaxLimit = size_t{1} << 28;
constexpr int kMaxSearches = 3;  // before the whole chain is read

void check_whole(std::string_view packed, size_t width, const char* name) {
    if (packed.size() % width != 0) {
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(packed.size()) +
                                    " bytes, which are not whole entries of " +
                                    std::to_string(width));
    }
}

void check_limit(size_t limit, const char* name) {
    if (limit < 2 || limit > kMaxLimit) {
        throw std::invalid_argument(std::string(name) + "_per_slot must be from 2 to " +
                                    std::to_string(kMaxLimit) + "; got " + std::to_string(limit));
    }
}

}  // namespace

ResidencyIndex::ResidencyIndex(size_t max_keys, size_t max_assumed_keys)
    : max_keys_(max_keys), max_young_(max_assumed_keys / 2) {
    check_limit(max_keys, "max_keys");
    check_limit(max_assumed_keys, "max_assumed_keys");
    std::random_device device;
    factor_ = (uint64_t{device()} << 32 | device()) | 1;
}

size_t ResidencyIndex::add_slot() {
    auto place = std::find(slots_.begin(), slots_.end(), nullptr);
    if (place == slots_.end()) {
        place = slots_.emplace(place);
    }
    *place = std::make_unique<Slot>();
    return static_cast<size_t>(place - slots_.begin());
}

void ResidencyIndex::drop_slot(int64_t slot) {
    slot_at(slot);
    slots_[static_cast<size_t>(slot)] = nullptr;
}

void ResidencyIndex::clear(int64_t slot) { slot_at(slot) = Slot(); }

size_t ResidencyIndex::num_keys(int64_t slot) { return slot_at(slot).size(); }

size_t ResidencyIndex::memory_bytes() const {
    size_t bytes = sizeof *this + slots_.capacity() * sizeof slots_[0];
    for (const auto& slot : slots_) {
        if (slot != nullptr) {
            bytes += sizeof(Slot) + slot->young.memory_bytes() + slot->old.memory_bytes();
        }
    }
    return bytes;
}

void ResidencyIndex::apply(int64_t slot, std::string_view stored, std::string_view evicted) {
    check_whole(stored, kStoredBytes, "stored");
    check_whole(evicted, kKeyBytes, "evicted");
    Slot& held = slot_at(slot);
    for (size_t at = 0; at < evicted.size(); at += kKeyBytes) {
        const uint64_t hash = hash_of(evicted.data() + at);
        held.young.erase(hash);
        held.old.erase(hash);
    }
    for (size_t at = 0; at < stored.size(); at += kStoredBytes) {
        const uint64_t hash = hash_of(stored.data() + at);
        uint32_t tokens;
        std::memcpy(&tokens, stored.data() + at + kKeyBytes, sizeof tokens);
        held.old.erase(hash);
        if (held.size() >= max_keys_ && held.young.find(hash) == nullptr) {
            ++num_refused_;
            continue;
        }
        held.young.put(hash, tokens);
    }
}

void ResidencyIndex::assume(int64_t slot, std::string_view keys, double tokens_per_key) {
    check_whole(keys, kKeyBytes, "keys");
    if (!(tokens_per_key >= 0 && tokens_per_key <= kMaxTokens)) {
        throw std::invalid_argument("tokens_per_key must be from 0 to " +
                                    std::to_string(kMaxTokens));
    }
    Slot& held = slot_at(slot);
    const size_t count = std::min(keys.size() / kKeyBytes, max_young_);
    size_t num_new = 0;
    for (size_t i = 0; i < count; ++i) {
        num_new += held.young.find(hash_of(keys.data() + i * kKeyBytes)) == nullptr ? 1 : 0;
    }
    if (held.young.size() + num_new > max_young_) {
        held.old = std::move(held.young);
        held.young = KeySet();
    }
    for (size_t i = 0; i < count; ++i) {
        const uint64_t hash = hash_of(keys.data() + i * kKeyBytes);
        held.old.erase(hash);
        const double tokens = static_cast<double>(i + 1) * tokens_per_key;
        held.young.put(hash, static_cast<uint32_t>(std::min<double>(tokens, kMaxTokens)));
    }
}

// All slots search in step: while one waits for memory, the others' words are on their way.
void ResidencyIndex::match(std::string_view keys, std::span<const int64_t> slots,
                           std::span<uint32_t> tokens) {
    check_whole(keys, kKeyBytes, "keys");
    const size_t num_keys = keys.size() / kKeyBytes;
    searches_.clear();
    for (const int64_t slot : slots) {
        const Slot& held = slot_at(slot);
        const bool is_hopeless = num_keys == 0 || held.size() == 0;
        searches_.push_back(is_hopeless ? Search{&held, 0, 0} : Search{&held, 1, num_keys});
    }
    for (bool is_busy = true; is_busy;) {
        is_busy = false;
        for (const Search& search : searches_) {
            if (!search.is_over()) {
                search.slot->prefetch(hash_of(keys.data() + (search.middle() - 1) * kKeyBytes));
            }
        }
        for (Search& search : searches_) {
            if (!search.is_over()) {
                search.step(hash_of(keys.data() + (search.middle() - 1) * kKeyBytes));
                is_busy = true;
            }
        }
    }
    for (size_t i = 0; i < searches_.size(); ++i) {
        tokens[i] = settle(searches_[i], keys);
    }
}

uint32_t ResidencyIndex::settle(Search search, std::string_view keys) const {
    if (search.low == 0) {
        return 0;
    }
    const auto find = [&](size_t index) {
        return search.slot->find(hash_of(keys.data() + index * kKeyBytes));
    };
    for (int count = 1; search.low > 2 && find(search.low - 2) == nullptr; ++count) {
        search.high = search.low - 2;
        search.low = 1;
        if (count == kMaxSearches) {
            while (search.low < search.high && find(search.low) != nullptr) {
                ++search.low;
            }
            break;
        }
        while (!search.is_over()) {
            search.step(hash_of(keys.data() + (search.middle() - 1) * kKeyBytes));
        }
    }
    const uint64_t* entry = find(search.low - 1);
    return entry == nullptr ? 0 : KeyTable::tokens_of(*entry);
}

const uint64_t* ResidencyIndex::Slot::find(uint64_t hash) const {
    const uint64_t* entry = young.find(hash);
    return entry != nullptr ? entry : old.find(hash);
}

void ResidencyIndex::Slot::prefetch(uint64_t hash) const {
    young.prefetch(hash);
    old.prefetch(hash);
}

ResidencyIndex::Slot& ResidencyIndex::slot_at(int64_t number) {
    const auto index = static_cast<size_t>(number);
    if (number < 0 || index >= slots_.size() || slots_[index] == nullptr) {
        throw std::out_of_range("slot " + std::to_string(number) + " is not in use");
    }
    return *slots_[index];
}

void ResidencyIndex::Search::step(uint64_t hash) {
    if (slot->find(hash) == nullptr) {
        high = middle() - 1;
    } else {
        low = middle();
    }
}

uint64_t ResidencyIndex::hash_of(const char* key) const {
    uint64_t word;
    std::memcpy(&word, key, sizeof word);
    return word * factor_;
}

}  // namespace octavo::router
