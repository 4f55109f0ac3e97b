#include "router/route_keys.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "router/blake2b.h"

namespace octavo::router {

namespace {

constexpr char kMessage = '\xff';
constexpr char kContent = '\xfe';
constexpr char kPart = '\xfd';
constexpr char kMedia = '\xfc';
constexpr char kField = '\xfb';
constexpr char kEnd = '\xfa';
constexpr char kPad = '\xf9';

constexpr size_t kMediaBytes = 16;
constexpr blake2b::State kKeyState = blake2b::initial_state(kKeyBytes, "octavo route");
constexpr blake2b::State kRootState = blake2b::initial_state(kKeyBytes, "octavo route 0");
constexpr blake2b::State kMediaState = blake2b::initial_state(kMediaBytes, "octavo media");

constexpr std::string_view name_of(Form form) {
    constexpr std::array<std::string_view, 5> kNames = {"chat", "text", "ids", "chat", "chat"};
    return kNames[static_cast<size_t>(form)];
}

// In the order in which the root has them.
constexpr std::array kChatFields = {
    kTools,           kDocuments,         kChatTemplate,     kChatTemplateKwargs,
    kReasoningEffort, kMmProcessorKwargs, kAddSpecialTokens, kTruncatePromptTokens,
    kTruncationSide};
constexpr std::array kPromptFields = {kAddSpecialTokens, kTruncatePromptTokens, kTruncationSide};
constexpr std::array kMessagesFields = {kTools, kChatTemplateKwargs, kThinking, kOutputConfig};
constexpr std::array kResponsesFields = {kTools, kChatTemplateKwargs, kReasoning};

std::span<const RootField> fields_of(Form form) {
    switch (form) {
        case Form::chat:
            return kChatFields;
        case Form::messages:
            return kMessagesFields;
        case Form::responses:
            return kResponsesFields;
        default:
            return kPromptFields;
    }
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

void begin_message(std::string_view role, std::string& data) {
    data.push_back(kMessage);
    data += role;
    data.push_back(kContent);
}

void begin_message(const Raw& role, std::string& data) {
    data.push_back(kMessage);
    append_text(data, role);
    data.push_back(kContent);
}

// Some members of an object, as they were named; none where it is no object.
template <size_t N>
std::array<Raw, N> members_of(const Raw& object, const std::array<std::string_view, N>& names,
                              KeyStack& keys) {
    std::array<Raw, N> found;
    if (object.is_object()) {
        Reader reader(object.json(), keys);
        reader.object(0, [&](std::string_view key) {
            const auto name = std::find(names.begin(), names.end(), key);
            const auto place = static_cast<size_t>(name - names.begin());
            const Raw value = reader.value(0);
            if (place < N) {
                found[place] = value;
            }
        });
    }
    return found;
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
    static const std::array<uint64_t, 5> plain_roots = {
        plain_root(Form::chat), plain_root(Form::text), plain_root(Form::ids),
        plain_root(Form::messages), plain_root(Form::responses)};
    const bool has_fields = std::any_of(parts.fields.begin(), parts.fields.end(),
                                        [](const Raw& field) { return field.is_given(); });
    if (!has_fields && parts.adapter.empty() && parts.salt.empty()) {
        return plain_roots[static_cast<size_t>(form)];
    }
    std::string material = root_material(form, parts.adapter, parts.salt);
    for (const RootField field : fields_of(form)) {
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
    begin_message(message.role, data);
    if (!append_content(content, false, data)) {
        is_valid_ = false;
        return;
    }
    append_field("name", message.name, data);
    append_field("tool_call_id", message.tool_call_id, data);
    append_field("tool_calls", message.tool_calls, data);
    append_field("reasoning",
                 is_absent(message.reasoning) ? message.reasoning_content : message.reasoning,
                 data);
}

// The instructions, which stand before all messages.
void Conversation::append_opening(const Raw& text, std::string& data) {
    if (!is_absent(text)) {
        begin_message("system", data);
        is_valid_ = append_content(text, false, data);
    }
}

void Conversation::read_turns(const Raw& system, const Raw& messages, std::string& data) {
    separator_ = '\n';  // texts beside each other become one
    append_opening(system, data);
    Reader reader(messages.json(), *keys_);
    reader.list(0, [&](size_t) {
        const Raw message = reader.value(0);
        if (is_valid_) {
            append_turn(message, data);
        }
    });
}

void Conversation::append_turn(const Raw& message, std::string& data) {
    const auto [role, content] = members_of<2>(message, {"role", "content"}, *keys_);
    if (!role.is_string()) {
        is_valid_ = false;
        return;
    }
    begin_message(role, data);
    is_valid_ = append_content(content, true, data);
}

void Conversation::read_items(const Raw& instructions, const Raw& input, std::string& data) {
    append_opening(instructions, data);
    if (!is_valid_) {
        return;
    }
    if (input.is_string()) {
        begin_message("user", data);
        append_string(input, data);
        return;
    }
    if (!input.is_list()) {
        is_valid_ = false;
        return;
    }
    Reader reader(input.json(), *keys_);
    reader.list(0, [&](size_t) {
        const Raw item = reader.value(0);
        if (is_valid_) {
            append_item(item, data);
        }
    });
}

void Conversation::append_item(const Raw& item, std::string& data) {
    if (!item.is_object()) {
        is_valid_ = false;
        return;
    }
    const auto [type, role, content, call_id, output] =
        members_of<5>(item, {"type", "role", "content", "call_id", "output"}, *keys_);
    const bool is_message = !type.is_given() || text_equals(type, "message");
    const Raw& author = is_message ? role : type;
    if (!author.is_string()) {
        is_valid_ = false;
        return;
    }
    begin_message(author, data);
    if (is_message) {
        is_valid_ = append_content(content, false, data);
    } else if (text_equals(type, "function_call_output")) {
        append_media(call_id, data);
        data.push_back(separator_);
        is_valid_ = append_content(output, false, data);
    } else {
        note_part(data);
        append_field("item", item, data);
    }
}

bool Conversation::append_content(const Raw& content, bool has_blocks, std::string& data) {
    if (content.is_string()) {
        append_string(content, data);
    } else if (content.is_list()) {
        append_parts(content, has_blocks, data);
    } else if (content.is_given() && *content.begin != 'n') {
        return false;
    } else {
        note_part(data);  // no text counts as an empty one
    }
    return true;
}

void Conversation::note_part(const std::string& data) {
    if (opening_ == 0) {
        opening_ = data.size();
    }
}

void Conversation::append_string(const Raw& string, std::string& data) {
    note_part(data);
    append_text(data, string);
}

struct Conversation::Part {
    Raw whole;
    Raw type;
    Raw text;
    Raw tool_use_id;
    Raw content;
    Raw uuid;

    Raw* field(std::string_view key) {
        return key == "type"          ? &type
               : key == "text"        ? &text
               : key == "tool_use_id" ? &tool_use_id
               : key == "content"     ? &content
               : key == "uuid"        ? &uuid
                                      : nullptr;
    }
};

void Conversation::append_parts(const Raw& content, bool has_blocks, std::string& data) {
    Reader reader(content.json(), *keys_);
    reader.list(0, [&](size_t index) {
        if (index != 0) {
            data.push_back(separator_);
        }
        if (reader.peek() == '"') {
            append_string(reader.string(), data);
            return;
        }
        Part part;
        part.whole.begin = reader.position();
        if (reader.peek() == '{') {
            reader.object(0, [&](std::string_view key) {
                Raw* field = part.field(key);
                const Raw value = reader.value(0);
                if (field != nullptr) {
                    *field = value;
                }
            });
        } else {
            reader.value(0);
        }
        part.whole.end = reader.position();
        const bool is_text = text_equals(part.type, "text") ||
                             text_equals(part.type, "input_text") ||
                             text_equals(part.type, "output_text");
        if (is_text && part.text.is_string()) {
            append_string(part.text, data);
        } else if (!has_blocks || !append_block(part, data)) {
            note_part(data);
            append_media_part(part, data);
            // A prompt often ends with its picture: a key must end there too.
            data.append((kChunkBytes - data.size() % kChunkBytes) % kChunkBytes, kPad);
        }
    });
}

// Calls of tools and their results; false for any other block.
bool Conversation::append_block(const Part& part, std::string& data) {
    if (text_equals(part.type, "tool_use")) {
        begin_message("tool_use", data);
        note_part(data);
        append_field("item", part.whole, data);
        return true;
    }
    if (!text_equals(part.type, "tool_result") || is_absent(part.content)) {
        return false;
    }
    append_media(part.tool_use_id, data);
    data.push_back(separator_);
    if (!append_content(part.content, false, data)) {
        append_media(part.content, data);
    }
    return true;
}

void Conversation::append_media(const Raw& value, std::string& data) {
    packed_.clear();
    if (value.is_given()) {
        pack_value(packed_, value, *keys_);
    } else {
        packed_.push_back('n');
    }
    append_packed_digest(data);
}

void Conversation::append_media_part(const Part& part, std::string& data) {
    const bool has_name =
        part.uuid.is_string() && !is_absent(part.uuid) &&
        (text_equals(part.type, "image_url") || text_equals(part.type, "input_audio") ||
         text_equals(part.type, "audio_url"));
    if (!has_name) {
        append_media(part.whole, data);
        return;
    }
    packed_.assign(1, 'u');  // no packed value begins with it
    for (const Raw& name : {part.type, part.uuid}) {
        append_text(packed_, name);
        packed_.push_back(kEnd);
    }
    append_packed_digest(data);
}

void Conversation::append_packed_digest(std::string& data) {
    const blake2b::State digest = blake2b::digest(kMediaState, packed_);
    data.push_back(kMedia);
    data.append(reinterpret_cast<const char*>(digest.data()), kMediaBytes);
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

}  // namespace octavo::router
