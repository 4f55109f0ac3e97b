// Values of a JSON text as they stand in it, and what they say.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace octavo::router {

// A value as it stands in the body. Not there: begin is null.
struct Raw {
    const char* begin = nullptr;
    const char* end = nullptr;
    bool has_escapes = false;  // of a string: its bytes are not yet its text

    bool is_given() const { return begin != nullptr; }
    bool is_string() const { return begin != nullptr && *begin == '"'; }
    bool is_object() const { return begin != nullptr && *begin == '{'; }
    bool is_list() const { return begin != nullptr && *begin == '['; }
    bool is_number() const {
        return begin != nullptr && (*begin == '-' || (*begin >= '0' && *begin <= '9'));
    }
    std::string_view json() const { return {begin, static_cast<size_t>(end - begin)}; }
    // What lies between a string's quotes.
    std::string_view inside() const { return {begin + 1, static_cast<size_t>(end - begin) - 2}; }
};

// Appends a string's text, escapes resolved.
void append_text(std::string& out, const Raw& string);
bool text_equals(const Raw& value, std::string_view text);
// The double nearest to a number; infinite where there is none.
double double_of(std::string_view number);

// The four hexadecimal digits of an escape, or -1.
int hex_unit(const char* at, const char* end);
constexpr bool is_high_surrogate(int unit) { return unit >= 0xD800 && unit < 0xDC00; }
constexpr bool is_low_surrogate(int unit) { return unit >= 0xDC00 && unit < 0xE000; }

}  // namespace octavo::router
