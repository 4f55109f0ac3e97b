// Prompts of token ids as the data of route keys.
#include <charconv>
#include <cstdint>
#include <cstring>

#include "router/route_keys.h"

namespace octavo::router {

bool append_ids(const Raw& list, KeyStack& keys, std::string& data, size_t* num_items) {
    bool is_valid = true;
    Reader reader(list.json(), keys);
    reader.list(0, [&](size_t) {
        const Raw item = reader.value(0);
        const std::string_view digits = item.json() == "-0" ? "0" : item.json();
        ++*num_items;
        uint32_t id = 0;
        const char* end = digits.data() + digits.size();
        const auto [stop, error] = std::from_chars(digits.data(), end, id);
        if (error != std::errc() || stop != end) {  // also what is no integer
            is_valid = false;
            return;
        }
        char bytes[sizeof id];
        std::memcpy(bytes, &id, sizeof id);
        data.append(bytes, sizeof id);
    });
    return is_valid;
}

}  // namespace octavo::router
