#include "router/json_reader.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace octavo::router {

namespace {

constexpr uint64_t kOnes = 0x0101010101010101;
constexpr uint64_t kHighs = 0x8080808080808080;

// The high bit of each byte of `word` that is below `limit` (at most 128); exact up to the lowest.
constexpr uint64_t bytes_below(uint64_t word, uint64_t limit) {
    return (word - kOnes * limit) & ~word & kHighs;
}

// The first byte that a string cannot simply hold: a quote, a backslash, control, or not ASCII.
const char* skip_plain(const char* at, const char* end) {
    for (; end - at >= 8; at += 8) {
        uint64_t word;
        std::memcpy(&word, at, 8);
        const uint64_t special = bytes_below(word ^ (kOnes * '"'), 1) |
                                 bytes_below(word ^ (kOnes * '\\'), 1) | bytes_below(word, 0x20) |
                                 (word & kHighs);
        if (special != 0) {
            return at + std::countr_zero(special) / 8;
        }
    }
    for (; at != end; ++at) {
        const auto byte = static_cast<uint8_t>(*at);
        if (byte < 0x20 || byte >= 0x80 || byte == '"' || byte == '\\') {
            break;
        }
    }
    return at;
}

}  // namespace

// -- strings --

Raw Reader::string() {
    Raw raw{at_, nullptr, false};
    ++at_;
    while (true) {
        at_ = skip_plain(at_, end_);
        if (at_ == end_) {
            fail("a string without an end", raw.begin);
        }
        const auto byte = static_cast<uint8_t>(*at_);
        if (byte == '"') {
            raw.end = ++at_;
            return raw;
        }
        if (byte == '\\') {
            raw.has_escapes = true;
            escape();
        } else if (byte >= 0x80) {
            multi_byte();
        } else {
            fail("a control character in a string");
        }
    }
}

void Reader::escape() {
    const char* start = at_;
    if (end_ - at_ < 2) {
        fail("a string without an end");
    }
    const char kind = at_[1];
    at_ += 2;
    if (kind != 'u') {
        switch (kind) {
            case '"':
            case '\\':
            case '/':
            case 'b':
            case 'f':
            case 'n':
            case 'r':
            case 't':
                return;
            default:
                fail("an unknown escape in a string", start);
        }
    }
    const int unit = hex_unit(at_, end_);
    if (unit < 0) {
        fail("\\u needs four hexadecimal digits", start);
    }
    at_ += 4;
    if (is_high_surrogate(unit) && end_ - at_ >= 6 && at_[0] == '\\' && at_[1] == 'u' &&
        is_low_surrogate(hex_unit(at_ + 2, end_))) {
        at_ += 6;
    } else if (is_high_surrogate(unit) || is_low_surrogate(unit)) {
        fail("half a surrogate pair in a string", start);
    }
}

// Characters of two to four bytes, as Unicode's table of well-formed sequences has them.
void Reader::multi_byte() {
    while (at_ != end_) {
        const auto byte = [this](int i) { return static_cast<uint8_t>(at_[i]); };
        const uint8_t lead = byte(0);
        if (lead < 0x80) {
            return;
        }
        const int size = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
        if (lead < 0xC2 || lead > 0xF4 || end_ - at_ < size) {
            fail("invalid UTF-8");
        }
        const uint8_t lowest = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
        const uint8_t highest = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
        bool is_valid = byte(1) >= lowest && byte(1) <= highest;
        for (int i = 2; i < size; ++i) {
            is_valid = is_valid && (byte(i) & 0xC0) == 0x80;
        }
        if (!is_valid) {
            fail("invalid UTF-8");
        }
        at_ += size;
    }
}

// -- other values --

Raw Reader::value(int depth) {
    const char* start = at_;
    switch (peek()) {
        case '"':
            return string();
        case '{':
            object(depth + 1, [this, depth](std::string_view) { value(depth + 1); });
            return {start, at_};
        case '[':
            list(depth + 1, [this, depth](size_t) { value(depth + 1); });
            return {start, at_};
        case 't':
            return literal("true");
        case 'f':
            return literal("false");
        case 'n':
            return literal("null");
        default:
            return number();
    }
}

Raw Reader::literal(std::string_view name) {
    const char* start = at_;
    const size_t left = static_cast<size_t>(end_ - at_);
    if (std::string_view(at_, std::min(left, name.size())) != name) {
        fail("expected a value");
    }
    at_ += name.size();
    return {start, at_};
}

Raw Reader::number() {
    const auto is_digit = [this] { return at_ != end_ && *at_ >= '0' && *at_ <= '9'; };
    const auto digits = [&] {
        const char* first = at_;
        while (is_digit()) {
            ++at_;
        }
        return at_ - first;
    };
    const char* start = at_;
    if (peek() == '-') {
        ++at_;
    }
    if (peek() == '0') {
        ++at_;
    } else if (digits() == 0) {
        fail("expected a value", start);
    }
    if (peek() == '.') {
        ++at_;
        if (digits() == 0) {
            fail("expected a digit");
        }
    }
    // Only an exponent, or very many digits before a point, make a number too large for a double.
    bool may_overflow = at_ - start > 300;
    if (peek() == 'e' || peek() == 'E') {
        may_overflow = true;
        ++at_;
        if (peek() == '+' || peek() == '-') {
            ++at_;
        }
        if (digits() == 0) {
            fail("expected a digit");
        }
    }
    const std::string_view text(start, static_cast<size_t>(at_ - start));
    if (text.size() > kMaxNumberBytes) {
        fail("a number of too many digits", start);
    }
    // Integers have no limit but that of their digits.
    if (may_overflow && text.find_first_of(".eE") != std::string_view::npos &&
        !std::isfinite(double_of(text))) {
        fail("a number that is too large", start);
    }
    return {start, at_};
}

// -- what an object or list must be --

void Reader::check_depth(int depth) const {
    if (depth > kMaxDepth) {
        throw ScanFailure("the body is nested deeper than " + std::to_string(kMaxDepth) + " levels",
                          static_cast<size_t>(at_ - begin_));
    }
}

void Reader::close_keys(size_t first_key) {
    std::string_view twice;
    if (keys_->holds_twice(first_key, &twice)) {
        throw ScanFailure(std::string(twice) + " is given twice",
                          static_cast<size_t>(at_ - begin_));
    }
    keys_->drop(first_key);
}

void Reader::fail(const char* problem, const char* where) const {
    const size_t offset = static_cast<size_t>(where - begin_);
    throw ScanFailure("the body is not valid JSON: " + std::string(problem) + " (at byte " +
                          std::to_string(offset) + ")",
                      offset);
}

}  // namespace octavo::router
