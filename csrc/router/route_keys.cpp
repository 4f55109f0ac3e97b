#include "router/route_keys.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "router/blake2b.h"

namespace octavo::router {

namespace {

constexpr char kMessage = '\xff';
constexpr char kContent = '\xfe';
constexpr char kPart = '\xfd';
constexpr char kMedia = '\xfc';
constexpr char kField = '\xfb';
constexpr char kEnd = '\xfa';

constexpr size_t kMediaBytes = 16;
constexpr blake2b::State kKeyState = blake2b::initial_state(kKeyBytes, "octavo route");
constexpr blake2b::State kRootState = blake2b::initial_state(kKeyBytes, "octavo route 0");
constexpr blake2b::State kMediaState = blake2b::initial_state(kMediaBytes, "octavo media");

constexpr std::string_view name_of(Form form) {
    return form == Form::chat ? "chat" : form == Form::text ? "text" : "ids";
}

uint64_t chunk_key(uint64_t parent, const char* chunk) {
    blake2b::Block block = {};
    block[0] = parent;
    std::memcpy(&block[1], chunk, kChunkBytes);
    blake2b::State state = kKeyState;
    blake2b::compress(state, block, kKeyBytes + kChunkBytes, true);
    return state[0];
}

void pack(std::string& out, Reader& reader) {
    switch (reader.peek()) {
        case '"':
            out.push_back('s');
            append_text(out, reader.string());
            out.push_back(kEnd);
            return;
        case '[':
            out.push_back('[');
            reader.list(0, [&](size_t) { pack(out, reader); });
            out.push_back(']');
            return;
        case '{':
            out.push_back('{');
            reader.object(0, [&](std::string_view key) {
                out += key;
                out.push_back(kEnd);
                pack(out, reader);
            });
            out.push_back('}');
            return;
        default:
            break;
    }
    const Raw value = reader.value(0);
    if (!value.is_number()) {
        out.push_back(*value.begin);  // null, true, false by their first letters
    } else if (is_integer(value)) {
        out.push_back('i');
        out += value.json() == "-0" ? "0" : value.json();
        out.push_back(';');
    } else {
        const double number = double_of(value.json());
        char bytes[sizeof number];
        std::memcpy(bytes, &number, sizeof number);
        out.push_back('d');
        out.append(bytes, sizeof number);
    }
}

std::string root_material(Form form, std::string_view adapter, std::string_view salt) {
    std::string material;
    for (const std::string_view part : {kRouteKeysVersion, name_of(form), adapter, salt}) {
        material += part;
        material.push_back(kEnd);
    }
    return material;
}

uint64_t plain_root(Form form) {
    return blake2b::digest(kRootState, root_material(form, "", ""))[0];
}

// Whether the engine would do the same without the field.
bool is_default(size_t field, Form form, const Raw& value) {
    return field == kAddSpecialTokens && value.json() == (form == Form::chat ? "false" : "true");
}

}  // namespace

void pack_value(std::string& out, const Raw& value, KeyStack& keys) {
    Reader reader(value.json(), keys);
    pack(out, reader);
}

bool is_absent(const Raw& value) {
    if (!value.is_given() || *value.begin == 'n') {
        return true;
    }
    if (value.is_string()) {
        return value.inside().empty();
    }
    return (value.is_list() || value.is_object()) &&
           value.inside().find_first_not_of(" \t\r\n") == std::string_view::npos;
}

bool is_integer(const Raw& value) {
    return value.is_number() && value.json().find_first_of(".eE") == std::string_view::npos;
}

uint64_t root_key(Form form, const RootParts& parts, KeyStack& keys, size_t* prompt_bytes) {
    // Most requests have nothing of their own here.
    static const std::array<uint64_t, 3> plain_roots = {
        plain_root(Form::chat), plain_root(Form::text), plain_root(Form::ids)};
    const bool has_fields = std::any_of(parts.fields.begin(), parts.fields.end(),
                                        [](const Raw& field) { return field.is_given(); });
    if (!has_fields && parts.adapter.empty() && parts.salt.empty()) {
        return plain_roots[static_cast<size_t>(form)];
    }
    std::string material = root_material(form, parts.adapter, parts.salt);
    const size_t first = form == Form::chat ? kTools : kAddSpecialTokens;
    for (size_t field = first; field < kNumRootFields; ++field) {
        const Raw& value = parts.fields[field];
        if (is_absent(value) || is_default(field, form, value)) {
            continue;
        }
        material += kRootFieldNames[field];
        material.push_back(kEnd);
        const size_t before = material.size();
        pack_value(material, value, keys);
        if (field == kTools || field == kDocuments) {
            *prompt_bytes += material.size() - before;
        }
        if (field == kTools && parts.hides_tools) {
            material += "tool_choice\xfasnone\xfa";
        }
    }
    return blake2b::digest(kRootState, material)[0];
}

uint64_t opening_key(uint64_t root, std::string_view opening) {
    std::string material(reinterpret_cast<const char*>(&root), sizeof root);
    material += opening;
    return blake2b::digest(kKeyState, material)[0];
}

void append_chain(std::string& out, uint64_t root, std::string_view data) {
    const size_t num_keys = data.size() / kChunkBytes;
    const size_t start = out.size();
    out.resize(start + num_keys * kKeyBytes);
    uint64_t key = root;
    for (size_t i = 0; i < num_keys; ++i) {
        key = chunk_key(key, data.data() + i * kChunkBytes);
        std::memcpy(out.data() + start + i * kKeyBytes, &key, kKeyBytes);
    }
}

// -- the conversation --

struct Conversation::Message {
    Raw role;
    Raw content;
    Raw name;
    Raw tool_call_id;
    Raw tool_calls;
    Raw reasoning;
    Raw reasoning_content;

    Raw* field(std::string_view key) {
        switch (key.size()) {
            case 4:
                return key == "role" ? &role : key == "name" ? &name : nullptr;
            case 7:
                return key == "content" ? &content : nullptr;
            case 9:
                return key == "reasoning" ? &reasoning : nullptr;
            case 10:
                return key == "tool_calls" ? &tool_calls : nullptr;
            case 12:
                return key == "tool_call_id" ? &tool_call_id : nullptr;
            case 17:
                return key == "reasoning_content" ? &reasoning_content : nullptr;
            default:
                return nullptr;
        }
    }
};

void Conversation::read(Reader& reader, int depth, std::string& data) {
    reader.list(depth, [&](size_t) {
        if (reader.peek() != '{') {
            reader.value(depth);
            is_valid_ = false;
            return;
        }
        Message message;
        reader.object(depth + 1, [&](std::string_view key) {
            Raw* field = message.field(key);
            const Raw value = reader.value(depth + 1);
            if (field != nullptr) {
                *field = value;
            }
        });
        if (is_valid_) {
            append(message, data);
        }
    });
}

void Conversation::append(const Message& message, std::string& data) {
    const Raw& content = message.content;
    if (!message.role.is_string()) {
        is_valid_ = false;
        return;
    }
    data.push_back(kMessage);
    append_text(data, message.role);
    data.push_back(kContent);
    if (content.is_string()) {
        append_content(content, data);
    } else if (content.is_list()) {
        append_parts(content, data);
    } else if (content.is_given() && *content.begin != 'n') {
        is_valid_ = false;
        return;
    } else if (opening_ == 0) {
        opening_ = data.size();  // no text counts as an empty one
    }
    append_field("name", message.name, data);
    append_field("tool_call_id", message.tool_call_id, data);
    append_field("tool_calls", message.tool_calls, data);
    append_field("reasoning",
                 is_absent(message.reasoning) ? message.reasoning_content : message.reasoning,
                 data);
}

void Conversation::append_content(const Raw& string, std::string& data) {
    if (opening_ == 0) {
        opening_ = data.size();
    }
    append_text(data, string);
}

void Conversation::append_parts(const Raw& content, std::string& data) {
    Reader reader(content.json(), *keys_);
    reader.list(0, [&](size_t index) {
        if (index != 0) {
            data.push_back(kPart);
        }
        if (reader.peek() == '"') {
            append_content(reader.string(), data);
            return;
        }
        const char* start = reader.position();
        Raw type;
        Raw text;
        if (reader.peek() == '{') {
            reader.object(0, [&](std::string_view key) {
                const bool is_type = key == "type";
                const bool is_text = key == "text";
                const Raw value = reader.value(0);
                if (is_type) {
                    type = value;
                } else if (is_text) {
                    text = value;
                }
            });
        } else {
            reader.value(0);
        }
        const bool is_text = text_equals(type, "text") || text_equals(type, "input_text") ||
                             text_equals(type, "output_text");
        if (is_text && text.is_string()) {
            append_content(text, data);
            return;
        }
        packed_.clear();
        pack_value(packed_, Raw{start, reader.position()}, *keys_);
        const blake2b::State digest = blake2b::digest(kMediaState, packed_);
        data.push_back(kMedia);
        data.append(reinterpret_cast<const char*>(digest.data()), kMediaBytes);
    });
}

void Conversation::append_field(std::string_view name, const Raw& value, std::string& data) {
    if (is_absent(value)) {
        return;
    }
    data.push_back(kField);
    data += name;
    data.push_back(kEnd);
    pack_value(data, value, *keys_);
}

// -- token ids --

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
