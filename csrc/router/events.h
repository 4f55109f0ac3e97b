// Streams of server-sent events: internal lines taken out, and where events end.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace octavo::router {

struct TokenLine {
    uint32_t answer;
    std::vector<uint32_t> token_ids;
};

struct SplitEvents {
    bool is_clean = true;  // nothing was taken out: `clean` is not filled
    std::string clean;
    std::vector<TokenLine> lines;
    std::optional<std::string_view> begin;
};

// Takes the lines of octavo_engine/protocol/resume.py out of whole events. Throws
// std::invalid_argument.
SplitEvents split_token_lines(std::string_view data);

// Behind the last complete event at or after `start`, where one begins; else `start`.
size_t find_event_end(std::string_view buffer, size_t start);

}  // namespace octavo::router
