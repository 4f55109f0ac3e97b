// A set of route keys with a number of tokens for each, in about ten bytes a key.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace octavo::router {

inline constexpr uint32_t kMaxTokens = (uint32_t{1} << 22) - 2;  // more is reported as this

// One part of a KeySet: open addressing in one word an entry. A word holds 42 bits of the key's
// hash, from which its home follows, and 22 bits of tokens plus one, so that no entry is zero.
class KeyTable {
  public:
    // Null where the key is not. Hashes are below 2^42.
    const uint64_t* find(uint64_t hash) const;
    void prefetch(uint64_t hash) const;
    // Whether it is new.
    bool put(uint64_t hash, uint32_t tokens);
    // Whether it was there.
    bool erase(uint64_t hash);

    uint32_t size() const { return size_; }
    uint32_t capacity() const { return capacity_; }
    static uint32_t tokens_of(uint64_t entry) {
        return static_cast<uint32_t>(entry & kTokenMask) - 1;
    }

  private:
    static constexpr int kHashBits = 42;
    static constexpr int kTokenBits = 22;
    static constexpr uint64_t kTokenMask = (uint64_t{1} << kTokenBits) - 1;

    // Homes rise with hashes; capacities need not be powers of two, so that growth is gradual.
    uint32_t home_of(uint64_t hash) const {
        return static_cast<uint32_t>(hash * capacity_ >> kHashBits);
    }
    uint32_t next(uint32_t at) const { return at + 1 == capacity_ ? 0 : at + 1; }
    void resize(uint32_t capacity);

    std::unique_ptr<uint64_t[]> entries_;
    uint32_t capacity_ = 0;  // below 2^22
    uint32_t size_ = 0;
};

// Keys spread over many tables: each grows by itself, so that no single growth takes long or needs
// much memory beside what it replaces.
class KeySet {
  public:
    const uint64_t* find(uint64_t hash) const {
        return size_ == 0 ? nullptr : tables_[hash >> kTableShift].find(inner(hash));
    }
    void prefetch(uint64_t hash) const {
        if (size_ != 0) {
            tables_[hash >> kTableShift].prefetch(inner(hash));
        }
    }
    void put(uint64_t hash, uint32_t tokens);
    bool erase(uint64_t hash);
    size_t size() const { return size_; }
    size_t memory_bytes() const;

  private:
    static constexpr int kTableShift = 56;
    static constexpr size_t kNumTables = size_t{1} << (64 - kTableShift);

    static uint64_t inner(uint64_t hash) { return hash >> 14 & ((uint64_t{1} << 42) - 1); }

    std::vector<KeyTable> tables_;  // none while empty
    size_t size_ = 0;
};

}  // namespace octavo::router
