#include "router/key_stack.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>

namespace octavo::router {

namespace {

// Multiplies and folds. With secret factors nobody outside can make keys meet in one place.
uint64_t fold(uint64_t a, uint64_t b) {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t secret() {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
}

uint64_t hash_of(std::string_view text) {
    static const uint64_t seed = secret();
    static const uint64_t factor = secret() | 1;
    uint64_t hash = fold(seed ^ text.size(), factor);
    size_t at = 0;
    for (; at < text.size(); at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
        hash = fold(hash ^ word ^ seed, factor ^ hash);
    }
    return hash;
}

}  // namespace

void KeyStack::push(const Raw& key) {
    if (!key.has_escapes) {
        const std::string_view inside = key.inside();
        keys_.push_back({inside.data(), 0, inside.size()});
        return;
    }
    const size_t at = resolved_.size();
    append_text(resolved_, key);
    keys_.push_back({nullptr, at, resolved_.size() - at});
}

bool KeyStack::holds_twice(size_t first, std::string_view* twice) {
    constexpr size_t kFew = 16;
    if (keys_.size() - first > kFew) {
        return holds_twice_many(first, twice);
    }
    for (size_t i = first + 1; i < keys_.size(); ++i) {
        for (size_t j = first; j < i; ++j) {
            if (keys_[i].size == keys_[j].size && text(keys_[i]) == text(keys_[j])) {
                *twice = text(keys_[i]);
                return true;
            }
        }
    }
    return false;
}

bool KeyStack::holds_twice_many(size_t first, std::string_view* twice) {
    const size_t count = keys_.size() - first;
    const size_t capacity = std::bit_ceil(count * 2);
    table_.assign(capacity, 0);  // places of keys, plus one
    for (size_t i = 0; i < count; ++i) {
        const std::string_view key = text(keys_[first + i]);
        size_t at = hash_of(key) & (capacity - 1);
        for (; table_[at] != 0; at = (at + 1) & (capacity - 1)) {
            if (text(keys_[first + table_[at] - 1]) == key) {
                *twice = key;
                return true;
            }
        }
        table_[at] = static_cast<uint32_t>(i + 1);
    }
    return false;
}

void KeyStack::drop(size_t first) {
    for (size_t i = first; i < keys_.size(); ++i) {
        if (keys_[i].json == nullptr) {
            resolved_.resize(keys_[i].at);
            break;
        }
    }
    keys_.resize(first);
}

void KeyStack::clear() {
    constexpr size_t kKept = 1 << 12;  // what an ordinary body needs; the rest was one stranger's
    keys_.clear();
    resolved_.clear();
    if (keys_.capacity() > kKept || resolved_.capacity() > kKept || table_.capacity() > kKept) {
        *this = KeyStack();
    }
}

}  // namespace octavo::router
