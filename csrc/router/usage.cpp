#include "router/usage.h"

#include <algorithm>
#include <array>

namespace octavo::router {

namespace {

constexpr std::string_view kUsage = "\"usage\":";
constexpr size_t kMaxBytes = 1024;  // of the object
constexpr size_t kMaxDigits = 12;
constexpr std::string_view kSuffix = "_tokens\"";

enum class Field { prompt, output, cached };

struct Name {
    std::string_view text;
    Field field;
};

constexpr std::array kNames = {
    Name{"prompt", Field::prompt},     Name{"input", Field::prompt},  Name{"output", Field::output},
    Name{"completion", Field::output}, Name{"cached", Field::cached},
};

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

bool is_digit(char c) { return c >= '0' && c <= '9'; }

void skip_spaces(std::string_view& text) {
    const auto* end = std::find_if_not(text.begin(), text.end(), is_space);
    text.remove_prefix(static_cast<size_t>(end - text.begin()));
}

bool take(std::string_view& text, std::string_view expected) {
    if (!text.starts_with(expected)) {
        return false;
    }
    text.remove_prefix(expected.size());
    return true;
}

// `text` begins behind a quote. True, and behind the number, where a count stands there.
bool take_count(std::string_view& text, Usage& usage) {
    const auto* name = std::find_if(kNames.begin(), kNames.end(),
                                    [&](const Name& one) { return text.starts_with(one.text); });
    if (name == kNames.end()) {
        return false;
    }
    std::string_view left = text.substr(name->text.size());
    if (!take(left, kSuffix)) {
        return false;
    }
    skip_spaces(left);
    if (!take(left, ":")) {
        return false;
    }
    skip_spaces(left);
    int64_t number = 0;
    size_t num_digits = 0;
    while (num_digits < std::min(kMaxDigits, left.size()) && is_digit(left[num_digits])) {
        number = number * 10 + (left[num_digits++] - '0');
    }
    if (num_digits == 0) {
        return false;
    }
    text = left.substr(num_digits);
    switch (name->field) {
        case Field::prompt:
            usage.prompt_tokens = number;
            break;
        case Field::output:
            usage.output_tokens = number;
            break;
        case Field::cached:
            usage.cached_tokens = number;
            break;
    }
    return true;
}

}  // namespace

Usage find_usage(std::string_view answer) {
    Usage usage;
    const size_t at = answer.rfind(kUsage);
    if (at == std::string_view::npos) {
        return usage;
    }
    std::string_view left = answer.substr(at, kMaxBytes);
    for (size_t quote = left.find('"'); quote != std::string_view::npos; quote = left.find('"')) {
        left.remove_prefix(quote + 1);
        take_count(left, usage);
    }
    return usage;
}

}  // namespace octavo::router
