#include "router/json_text.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

namespace octavo::router {

namespace {

int hex_digit(char c) {
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    const char lower = static_cast<char>(c | 0x20);
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

void append_utf8(std::string& out, uint32_t code) {
    const auto put = [&out](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
    if (code < 0x80) {
        put(code);
    } else if (code < 0x800) {
        put(0xC0 | code >> 6);
        put(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        put(0xE0 | code >> 12);
        put(0x80 | (code >> 6 & 0x3F));
        put(0x80 | (code & 0x3F));
    } else {
        put(0xF0 | code >> 18);
        put(0x80 | (code >> 12 & 0x3F));
        put(0x80 | (code >> 6 & 0x3F));
        put(0x80 | (code & 0x3F));
    }
}

char plain_escape(char c) {
    switch (c) {
        case 'b':
            return '\b';
        case 'f':
            return '\f';
        case 'n':
            return '\n';
        case 'r':
            return '\r';
        case 't':
            return '\t';
        default:
            return c;
    }
}

}  // namespace

int hex_unit(const char* at, const char* end) {
    if (end - at < 4) {
        return -1;
    }
    int unit = 0;
    for (int i = 0; i < 4; ++i) {
        const int digit = hex_digit(at[i]);
        if (digit < 0) {
            return -1;
        }
        unit = unit << 4 | digit;
    }
    return unit;
}

void append_text(std::string& out, const Raw& string) {
    const std::string_view inside = string.inside();
    if (!string.has_escapes) {
        out += inside;
        return;
    }
    const char* at = inside.data();
    const char* end = at + inside.size();
    while (true) {
        const size_t left = static_cast<size_t>(end - at);
        const void* found = left == 0 ? nullptr : std::memchr(at, '\\', left);
        if (found == nullptr) {
            out.append(at, left);
            return;
        }
        const char* slash = static_cast<const char*>(found);
        out.append(at, static_cast<size_t>(slash - at));
        at = slash + 2;
        if (slash[1] != 'u') {
            out.push_back(plain_escape(slash[1]));
            continue;
        }
        auto code = static_cast<uint32_t>(hex_unit(at, end));
        at += 4;
        if (is_high_surrogate(
                static_cast<int>(code))) {  // the other half is there: the reader saw it
            code = 0x10000 + ((code - 0xD800) << 10) +
                   (static_cast<uint32_t>(hex_unit(at + 2, end)) - 0xDC00);
            at += 6;
        }
        append_utf8(out, code);
    }
}

bool text_equals(const Raw& value, std::string_view text) {
    if (!value.is_string()) {
        return false;
    }
    if (!value.has_escapes) {
        return value.inside() == text;
    }
    std::string resolved;
    append_text(resolved, value);
    return resolved == text;
}

double double_of(std::string_view number) {
#if defined(__cpp_lib_to_chars)
    double value = 0;
    const char* end = number.data() + number.size();
    // Beyond the range it does not tell too large from too small.
    if (std::from_chars(number.data(), end, value).ec == std::errc()) {
        return value;
    }
#endif
    return std::strtod(std::string(number).c_str(), nullptr);
}

}  // namespace octavo::router
