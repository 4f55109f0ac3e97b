// Prompts under way, by name: the compiled twin of octavo_router/residency/underway.py.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace octavo::router {

// The names of one prompt, shortest prefix first. A body is too short for more than these.
class Names {
  public:
    static constexpr size_t kMax = 32;

    void push(uint64_t name) { names_[count_++] = name; }
    std::span<const uint64_t> all() const { return {names_.data(), count_}; }
    bool is_full() const { return count_ == kMax; }

  private:
    std::array<uint64_t, kMax> names_;
    size_t count_ = 0;
};

class Underway {
  public:
    using Keys = std::shared_ptr<const std::string>;
    // Distinguished by address alone. One that has died leaves at most a name too many behind.
    using Endpoint = const void*;

    Underway();

    void begin(std::span<const uint64_t> names);
    void end(std::span<const uint64_t> names);
    void compute(std::span<const uint64_t> names, const Keys& keys, Endpoint endpoint);
    void computed(std::span<const uint64_t> names, Endpoint endpoint);
    size_t sharers(uint64_t name) const;
    void credit(std::span<const uint64_t> names, std::string_view keys,
                std::span<const Endpoint> endpoints, std::span<int64_t> matched,
                double tokens_per_key) const;
    size_t num_computing() const { return num_computing_; }

  private:
    struct Computing {
        Endpoint endpoint;
        size_t num_requests;
        Keys keys;  // of the latest
    };
    struct Entry {
        size_t num_requests = 0;
        std::vector<Computing> computing;
    };
    struct Hash {  // with a secret factor: nobody can make names that crowd one place
        uint64_t factor;
        size_t operator()(uint64_t name) const { return (name * factor) >> 16; }
    };

    Entry& at(uint64_t name);
    void drop_if_done(uint64_t name, const Entry& entry);

    std::unordered_map<uint64_t, Entry, Hash> entries_;
    size_t num_computing_ = 0;
};

}  // namespace octavo::router
