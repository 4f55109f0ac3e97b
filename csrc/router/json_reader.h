// Strict JSON, read in place: one pass, no tree. Whatever is wrong ends in a ScanFailure.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "router/key_stack.h"

namespace octavo::router {

inline constexpr int kMaxDepth = 32;             // objects and lists inside one another
inline constexpr size_t kMaxNumberBytes = 4300;  // what Python, and so an engine, converts
inline constexpr size_t kMaxBodyBytes = (size_t{1} << 31) - 1;

class ScanFailure : public std::runtime_error {
  public:
    ScanFailure(const std::string& message, size_t offset)
        : std::runtime_error(message), offset(offset) {}
    size_t offset;  // in bytes
};

class Reader {
  public:
    Reader(std::string_view body, KeyStack& keys)
        : begin_(body.data()), at_(begin_), end_(begin_ + body.size()), keys_(&keys) {}

    void skip_blank();
    bool is_at_end() const { return at_ == end_; }
    char peek() const { return at_ == end_ ? '\0' : *at_; }
    const char* position() const { return at_; }
    [[noreturn]] void fail(const char* problem) const { fail(problem, at_); }
    [[noreturn]] void fail(const char* problem, const char* where) const;

    // Each reads one value, which begins at the position. Depth counts the objects and lists
    // around it.
    Raw value(int depth);
    Raw string();

    // Calls on_value(key) with the position at each key's value, which it must read.
    template <class OnValue>
    void object(int depth, OnValue on_value);
    // Calls on_item(index) with the position at each item, which it must read.
    template <class OnItem>
    void list(int depth, OnItem on_item);

  private:
    void check_depth(int depth) const;
    void close_keys(size_t first_key);
    void escape();
    void multi_byte();
    Raw number();
    Raw literal(std::string_view name);

    const char* begin_;
    const char* at_;
    const char* end_;
    KeyStack* keys_;
};

// -- inline parts --

inline void Reader::skip_blank() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) {
        ++at_;
    }
}

template <class OnValue>
void Reader::object(int depth, OnValue on_value) {
    check_depth(depth);
    const size_t first_key = keys_->size();
    ++at_;
    skip_blank();
    if (peek() == '}') {
        ++at_;
        return;
    }
    while (true) {
        if (peek() != '"') {
            fail("expected a key in double quotes");
        }
        keys_->push(string());
        skip_blank();
        if (peek() != ':') {
            fail("expected ':' after a key");
        }
        ++at_;
        skip_blank();
        on_value(keys_->last());
        skip_blank();
        if (peek() == ',') {
            ++at_;
            skip_blank();
            continue;
        }
        if (peek() != '}') {
            fail("expected ',' or '}'");
        }
        close_keys(first_key);
        ++at_;
        return;
    }
}

template <class OnItem>
void Reader::list(int depth, OnItem on_item) {
    check_depth(depth);
    ++at_;
    skip_blank();
    if (peek() == ']') {
        ++at_;
        return;
    }
    for (size_t index = 0;; ++index) {
        on_item(index);
        skip_blank();
        if (peek() == ',') {
            ++at_;
            skip_blank();
            continue;
        }
        if (peek() != ']') {
            fail("expected ',' or ']'");
        }
        ++at_;
        return;
    }
}

}  // namespace octavo::router
