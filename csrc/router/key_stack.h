// The keys of the objects that are being read: no object may have one twice.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "router/json_text.h"

namespace octavo::router {

class KeyStack {
  public:
    size_t size() const { return keys_.size(); }
    void push(const Raw& key);
    std::string_view last() const { return text(keys_.back()); }
    // Whether two keys from `first` on are the same; then `twice` is that key.
    bool holds_twice(size_t first, std::string_view* twice);
    void drop(size_t first);  // all from there on
    void clear();

  private:
    struct Key {
        const char* json;  // where the body has it; null where its escapes had to be resolved
        size_t at;         // then: where in resolved_
        size_t size;
    };

    std::string_view text(const Key& key) const {
        return {key.json != nullptr ? key.json : resolved_.data() + key.at, key.size};
    }
    bool holds_twice_many(size_t first, std::string_view* twice);

    std::vector<Key> keys_;
    std::string resolved_;
    std::vector<uint32_t> table_;
};

}  // namespace octavo::router
