#include "router/underway.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>

namespace octavo::router {

namespace {

constexpr size_t kKeyBytes = 8;

uint64_t key_at(std::string_view keys, size_t number) {
    uint64_t key;
    std::memcpy(&key, keys.data() + number * kKeyBytes, sizeof key);
    return key;
}

// Leading keys that two prompts share. A key names all before it, so halving finds the end.
size_t num_common(std::string_view keys, std::string_view other) {
    size_t low = 0;
    size_t high = std::min(keys.size(), other.size()) / kKeyBytes;
    if (high > 0 && key_at(keys, high - 1) == key_at(other, high - 1)) {
        return high;
    }
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (key_at(keys, middle) == key_at(other, middle)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

uint64_t secret_factor() {
    std::random_device device;
    return (uint64_t{device()} << 32 | device()) | 1;
}

}  // namespace

Underway::Underway() : entries_(64, Hash{secret_factor()}) {}

void Underway::begin(std::span<const uint64_t> names) {
    for (const uint64_t name : names) {
        ++entries_[name].num_requests;
    }
}

void Underway::end(std::span<const uint64_t> names) {
    for (const uint64_t name : names) {
        Entry& entry = at(name);
        --entry.num_requests;
        drop_if_done(name, entry);
    }
}

void Underway::compute(std::span<const uint64_t> names, const Keys& keys, Endpoint endpoint) {
    ++num_computing_;
    for (const uint64_t name : names) {
        std::vector<Computing>& there = entries_[name].computing;
        const auto known = std::ranges::find(there, endpoint, &Computing::endpoint);
        if (known == there.end()) {
            there.push_back({endpoint, 1, keys});
        } else {
            ++known->num_requests;
            known->keys = keys;
        }
    }
}

void Underway::computed(std::span<const uint64_t> names, Endpoint endpoint) {
    --num_computing_;
    for (const uint64_t name : names) {
        Entry& entry = at(name);
        const auto known = std::ranges::find(entry.computing, endpoint, &Computing::endpoint);
        if (known == entry.computing.end()) {
            throw std::out_of_range("the endpoint does not compute this prompt");
        }
        if (--known->num_requests == 0) {
            entry.computing.erase(known);
            drop_if_done(name, entry);
        }
    }
}

size_t Underway::sharers(uint64_t name) const {
    const auto found = entries_.find(name);
    return found == entries_.end() ? 0 : found->second.num_requests;
}

void Underway::credit(std::span<const uint64_t> names, std::string_view keys,
                      std::span<const Endpoint> endpoints, std::span<int64_t> matched,
                      double tokens_per_key) const {
    const auto first = entries_.find(names.front());
    if (first == entries_.end() || first->second.computing.empty()) {
        return;  // nobody begins like this: the usual case
    }
    std::vector<Endpoint> credited;
    for (size_t at = names.size(); at-- > 0;) {  // longest first; each endpoint's first counts
        const auto found = entries_.find(names[at]);
        if (found == entries_.end()) {
            continue;
        }
        for (const Computing& one : found->second.computing) {
            if (std::ranges::find(credited, one.endpoint) != credited.end()) {
                continue;
            }
            credited.push_back(one.endpoint);
            const auto place = std::ranges::find(endpoints, one.endpoint);
            if (place != endpoints.end()) {
                const auto shared = static_cast<double>(num_common(keys, *one.keys));
                int64_t& tokens = matched[static_cast<size_t>(place - endpoints.begin())];
                tokens = std::max(tokens, static_cast<int64_t>(shared * tokens_per_key));
            }
        }
        if (credited.size() >= endpoints.size()) {
            return;
        }
    }
}

Underway::Entry& Underway::at(uint64_t name) {
    const auto found = entries_.find(name);
    if (found == entries_.end()) {
        throw std::out_of_range("no prompt of this name is under way");
    }
    return found->second;
}

void Underway::drop_if_done(uint64_t name, const Entry& entry) {
    if (entry.num_requests == 0 && entry.computing.empty()) {
        entries_.erase(name);
    }
}

}  // namespace octavo::router
