// Which prompt prefixes each engine holds: the index behind octavo_router/residency/api.py.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "router/key_table.h"

namespace octavo::router {

inline constexpr size_t kMaxKeys = 2'000'000;
inline constexpr size_t kMaxAssumedKeys = 65'536;  // about a million tokens

class ResidencyIndex {
  public:
    ResidencyIndex(size_t max_keys, size_t max_assumed_keys);
    ResidencyIndex(const ResidencyIndex&) = delete;
    ResidencyIndex& operator=(const ResidencyIndex&) = delete;

    size_t add_slot();
    void drop_slot(int64_t slot);
    void apply(int64_t slot, std::string_view stored, std::string_view evicted);
    void clear(int64_t slot);
    void assume(int64_t slot, std::string_view keys, double tokens_per_key);
    // One number of tokens for each of `slots`.
    void match(std::string_view keys, std::span<const int64_t> slots, std::span<uint32_t> tokens);
    size_t num_keys(int64_t slot);
    size_t memory_bytes() const;
    uint64_t num_refused() const { return num_refused_; }

  private:
    // What was stored or assumed lately, and what was assumed before that. When `young` holds half
    // of the limit of assumed keys, `old` is forgotten and `young` becomes it.
    struct Slot {
        KeySet young;
        KeySet old;

        const uint64_t* find(uint64_t hash) const;
        void prefetch(uint64_t hash) const;
        size_t size() const { return young.size() + old.size(); }
    };

    // A slot's search by halves for the deepest key held, where keys held are a prefix of the chain
    // but for gaps. The first key is taken for held until nothing deeper was found, for it may
    // stand for too few tokens to be stored. Where the search ends, the key before must be held
    // too; if not, one of the two is a gap or a collision, and the search goes on before it.
    struct Search {
        const Slot* slot;
        size_t low;   // this many keys are held, as far as was seen
        size_t high;  // and at most this many

        bool is_over() const { return low >= high; }
        size_t middle() const { return (low + high + 1) / 2; }
        void step(uint64_t hash);
    };

    Slot& slot_at(int64_t number);
    uint64_t hash_of(const char* key) const;
    uint32_t settle(Search search, std::string_view keys) const;

    std::vector<std::unique_ptr<Slot>> slots_;  // null: free
    size_t max_keys_;
    size_t max_young_;
    uint64_t factor_;  // secret and odd, so that nobody can make keys that crowd one place
    uint64_t num_refused_ = 0;
    std::vector<Search> searches_;  // kept from one match to the next
};

}  // namespace octavo::router
