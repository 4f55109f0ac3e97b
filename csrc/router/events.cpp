#include "router/events.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <stdexcept>

namespace octavo::router {

namespace {

constexpr std::string_view kLinePrefix = ": octavo ";
constexpr std::string_view kBegin = "begin ";
constexpr size_t kMaxIndexDigits = 9;
constexpr size_t kMaxIdDigits = 10;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// One decimal number from the front of `text`; false if there is none or it is too long.
bool take_number(std::string_view& text, size_t max_digits, uint32_t& number) {
    const auto* end = std::find_if_not(text.begin(), text.end(), is_digit);
    const auto size = static_cast<size_t>(end - text.begin());
    const auto result = std::from_chars(text.data(), text.data() + size, number);
    if (size == 0 || size > max_digits || result.ec != std::errc()) {
        return false;
    }
    text.remove_prefix(size);
    return true;
}

bool take(std::string_view& text, char expected) {
    if (text.empty() || text.front() != expected) {
        return false;
    }
    text.remove_prefix(1);
    return true;
}

TokenLine read_token_line(std::string_view line) {
    std::string_view left = line.substr(kLinePrefix.size());
    TokenLine result{};
    bool is_valid = take_number(left, kMaxIndexDigits, result.answer);
    if (is_valid && left.empty()) {
        return result;  // an event that brought no tokens
    }
    is_valid = is_valid && take(left, ' ');
    do {
        uint32_t id = 0;
        is_valid = is_valid && take_number(left, kMaxIdDigits, id);
        result.token_ids.push_back(id);
    } while (is_valid && take(left, ','));
    if (!is_valid || !left.empty()) {
        throw std::invalid_argument("a token line cannot be read: " +
                                    std::string(line.substr(0, 80)));
    }
    return result;
}

// Behind the line that begins at `at`, and behind its end.
struct LineEnds {
    size_t text;
    size_t line;
};

LineEnds line_ends(std::string_view data, size_t at, bool has_returns) {
    const size_t text = has_returns ? data.find_first_of("\r\n", at) : data.find('\n', at);
    if (text == std::string_view::npos) {
        return {data.size(), data.size()};
    }
    const bool is_pair = data[text] == '\r' && text + 1 < data.size() && data[text + 1] == '\n';
    return {text, text + (is_pair ? 2 : 1)};
}

}  // namespace

SplitEvents split_token_lines(std::string_view data) {
    SplitEvents result;
    const bool has_returns = data.find('\r') != std::string_view::npos;
    size_t kept = 0;  // what comes before is in `clean`, or taken out
    for (size_t at = 0; at < data.size();) {
        const LineEnds ends = line_ends(data, at, has_returns);
        const std::string_view line = data.substr(at, ends.text - at);
        if (line.starts_with(kLinePrefix)) {
            result.is_clean = false;
            result.clean += data.substr(kept, at - kept);
            kept = ends.line;
            const std::string_view content = line.substr(kLinePrefix.size());
            if (content.starts_with(kBegin)) {
                result.begin = content.substr(kBegin.size());
            } else if (!content.empty() && is_digit(content.front())) {
                result.lines.push_back(read_token_line(line));
            }  // else a word of a later version, which is not for clients either
        }
        at = ends.line;
    }
    if (!result.is_clean) {
        result.clean += data.substr(kept);
    }
    return result;
}

// An empty line ends an event: a line end right after a line end, or where an event begins. Most
// buffers end with one, hence backwards.
size_t find_event_end(std::string_view buffer, size_t start) {
    for (size_t at = buffer.size(); at > start; --at) {
        const char c = buffer[at - 1];
        if (c != '\n' && c != '\r') {
            continue;
        }
        const bool is_first = at - 1 == start;
        const char before = is_first ? '\n' : buffer[at - 2];
        if (c == '\r') {
            if (before == '\n' || before == '\r') {
                return at < buffer.size() && buffer[at] == '\n' ? at + 1 : at;
            }
        } else if (before == '\n') {
            return at;
        }
    }
    return start;
}

}  // namespace octavo::router
