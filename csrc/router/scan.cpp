#include "router/scan.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "router/json_reader.h"
#include "router/route_keys.h"

namespace octavo::router {

namespace {

enum Field : size_t {
    kModel = kNumRootFields,  // the root's fields come first
    kMessages,
    kPrompt,
    kStream,
    kStreamOptions,
    kMaxTokens,
    kMaxCompletionTokens,
    kMaxOutputTokens,
    kN,
    kPriority,
    kUser,
    kCacheSalt,
    kSessionId,
    kSessionParams,
    kPromptCacheKey,
    kToolChoice,
    kSystem,
    kInstructions,
    kInput,
    kPreviousResponseId,
    kTruncation,
    kNumFields,
};
constexpr std::array<std::string_view, kNumFields - kModel> kFieldNames = {"model",
                                                                           "messages",
                                                                           "prompt",
                                                                           "stream",
                                                                           "stream_options",
                                                                           "max_tokens",
                                                                           "max_completion_tokens",
                                                                           "max_output_tokens",
                                                                           "n",
                                                                           "priority",
                                                                           "user",
                                                                           "cache_salt",
                                                                           "session_id",
                                                                           "session_params",
                                                                           "prompt_cache_key",
                                                                           "tool_choice",
                                                                           "system",
                                                                           "instructions",
                                                                           "input",
                                                                           "previous_response_id",
                                                                           "truncation"};

// Octavo's residency/api.py says what these are.
constexpr std::array<std::string_view, 7> kPrivileged = {
    "kv_transfer_params",     "ec_transfer_params", "data_parallel_rank", "routed_dp_rank",
    "disagg_prefill_dp_rank", "sampling_params",    "vllm_xargs"};
constexpr std::string_view kPrivilegedPrefix = "bootstrap_";

using Fields = std::array<Raw, kNumFields>;

// What is kept from one body to the next.
struct Workspace {
    KeyStack keys;
    std::string data;

    void clear() {
        constexpr size_t kKept = 1 << 18;
        keys.clear();
        data.clear();
        if (data.capacity() > kKept) {
            data = std::string();
        }
    }
};

size_t field_of(std::string_view key) {
    for (size_t i = 0; i < kFieldNames.size(); ++i) {
        if (kFieldNames[i] == key) {
            return kModel + i;
        }
    }
    for (size_t i = 0; i < kNumRootFields; ++i) {
        if (kRootFieldNames[i] == key) {
            return i;
        }
    }
    return kNumFields;
}

bool is_privileged(std::string_view key) {
    return key.starts_with(kPrivilegedPrefix) ||
           std::find(kPrivileged.begin(), kPrivileged.end(), key) != kPrivileged.end();
}

std::string text_of(const Raw& value) {
    std::string text;
    if (value.is_string()) {
        append_text(text, value);
    }
    return text;
}

bool is_true(const Raw& value) { return value.is_given() && value.json() == "true"; }

// Beyond 2^53 JSON's readers disagree.
std::optional<int64_t> int_of(const Raw& value) {
    constexpr int64_t kLimit = int64_t{1} << 53;
    if (!is_integer(value)) {
        return std::nullopt;
    }
    int64_t number = 0;
    const std::string_view digits = value.json();
    const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (result.ec != std::errc() || number <= -kLimit || number >= kLimit) {
        return std::nullopt;
    }
    return number;
}

// A member of an object; not there if `object` is none.
Raw member_of(const Raw& object, std::string_view name, KeyStack& keys) {
    Raw found;
    if (object.is_object()) {
        Reader reader(object.json(), keys);
        reader.object(0, [&](std::string_view key) {
            const bool is_wanted = key == name;
            const Raw value = reader.value(0);
            if (is_wanted) {
                found = value;
            }
        });
    }
    return found;
}

// The prompt of a completion as data, and the sizes of all its prompts. No form: no prompt.
std::optional<Form> read_prompt(const Raw& prompt, Workspace& space, Scan& scan) {
    std::string& data = space.data;
    if (prompt.is_string()) {
        append_text(data, prompt);
        scan.num_prompts = 1;
        scan.prompt_bytes = data.size();
        return Form::text;
    }
    if (!prompt.is_list()) {
        return std::nullopt;
    }
    if (is_absent(prompt)) {
        return Form::ids;  // of which there are none
    }
    Reader inside(prompt.inside(), space.keys);
    inside.skip_blank();
    const Raw first = inside.value(0);
    if (is_integer(first)) {
        scan.num_prompts = 1;
        const bool is_valid = append_ids(prompt, space.keys, data, &scan.num_prompt_ids);
        return is_valid ? std::optional(Form::ids) : std::nullopt;
    }
    bool is_valid = false;
    std::string others;  // prompts after the first: read for their sizes only
    Reader reader(prompt.json(), space.keys);
    reader.list(0, [&](size_t index) {
        const Raw item = reader.value(0);
        std::string& text = index == 0 ? data : others;
        others.clear();
        ++scan.num_prompts;
        if (item.is_string()) {
            append_text(text, item);
            scan.prompt_bytes += text.size();
            is_valid = is_valid || index == 0;
        } else if (item.is_list()) {
            const bool are_ids = append_ids(item, space.keys, text, &scan.num_prompt_ids);
            is_valid = is_valid || (index == 0 && are_ids);
        }
    });
    if (!is_valid) {
        return std::nullopt;
    }
    return first.is_string() ? Form::text : Form::ids;
}

// The top level: where each field lies. A conversation is read on the way.
void read_fields(std::string_view body, BodyKind kind, Workspace& space, Fields& fields,
                 Conversation& conversation, Scan& scan) {
    Reader reader(body, space.keys);
    reader.skip_blank();
    if (reader.is_at_end()) {
        throw ScanFailure("the body is empty; send a JSON object", body.size());
    }
    if (reader.peek() != '{') {
        const auto offset = static_cast<size_t>(reader.position() - body.data());
        reader.value(0);
        throw ScanFailure("the body must be a JSON object", offset);
    }
    reader.object(1, [&](std::string_view key) {
        const size_t field = field_of(key);
        if (field == kMessages && kind == BodyKind::chat && reader.peek() == '[') {
            const char* start = reader.position();
            conversation.read(reader, 2, space.data);
            fields[field] = {start, reader.position()};
            return;
        }
        const Raw value = reader.value(1);
        if (field != kNumFields) {
            fields[field] = value;
        } else if (is_privileged(key)) {
            scan.is_privileged = true;
        }
    });
    reader.skip_blank();
    if (!reader.is_at_end()) {
        reader.fail("something follows the object");
    }
}

bool is_null(const Raw& value) { return !value.is_given() || *value.begin == 'n'; }

// The conversation of a body of this kind, as data. No form: there is none, or not all of it.
std::optional<Form> read_conversation(const Fields& fields, BodyKind kind, Workspace& space,
                                      Conversation& conversation) {
    Form form = Form::chat;
    bool is_there = fields[kMessages].is_list();
    if (kind == BodyKind::messages && is_there) {
        form = Form::messages;
        conversation.read_turns(fields[kSystem], fields[kMessages], space.data);
    } else if (kind == BodyKind::responses) {
        // What was said before is kept by one engine, and what is dropped is known to it alone.
        is_there =
            is_null(fields[kPreviousResponseId]) && !text_equals(fields[kTruncation], "auto");
        form = Form::responses;
        if (is_there) {
            conversation.read_items(fields[kInstructions], fields[kInput], space.data);
        }
    }
    return is_there && conversation.is_valid() ? std::optional(form) : std::nullopt;
}

uint64_t read_root(const Fields& fields, Form form, const AdapterOf& adapter_of, Workspace& space,
                   Scan& scan) {
    RootParts parts;
    const std::string adapter =
        adapter_of && !scan.model.empty() ? adapter_of(scan.model) : std::string();
    parts.adapter = adapter;
    parts.salt = scan.cache_salt;
    std::copy_n(fields.begin(), kNumRootFields, parts.fields.begin());
    const Raw& choice = fields[kToolChoice];
    parts.hides_tools = text_equals(
        form == Form::messages ? member_of(choice, "type", space.keys) : choice, "none");
    return root_key(form, parts, space.keys, &scan.prompt_bytes);
}

}  // namespace

Scan scan(std::string_view body, BodyKind kind, const AdapterOf& adapter_of) {
    if (body.size() > kMaxBodyBytes) {
        throw ScanFailure("the body is longer than " + std::to_string(kMaxBodyBytes) + " bytes", 0);
    }
    thread_local Workspace space;
    space.clear();
    Fields fields;
    Conversation conversation(space.keys);
    Scan scan;
    read_fields(body, kind, space, fields, conversation, scan);

    scan.model = text_of(fields[kModel]);
    if (fields[kModel].is_string()) {
        scan.model_start = static_cast<size_t>(fields[kModel].begin - body.data());
        scan.model_end = static_cast<size_t>(fields[kModel].end - body.data());
    }
    scan.user = text_of(fields[kUser]);
    scan.cache_salt = text_of(fields[kCacheSalt]);
    scan.session = text_of(fields[kSessionId]);
    if (scan.session.empty()) {
        scan.session = text_of(member_of(fields[kSessionParams], "session_id", space.keys));
    }
    if (scan.session.empty()) {
        scan.session = text_of(fields[kPromptCacheKey]);
    }
    scan.stream = is_true(fields[kStream]);
    scan.include_usage = is_true(member_of(fields[kStreamOptions], "include_usage", space.keys));
    std::optional<int64_t> max_tokens;
    if (kind == BodyKind::chat) {
        max_tokens = int_of(fields[kMaxCompletionTokens]);
    } else if (kind == BodyKind::responses) {
        max_tokens = int_of(fields[kMaxOutputTokens]);
    }
    if (!max_tokens) {
        max_tokens = int_of(fields[kMaxTokens]);
    }
    scan.max_tokens = std::max<int64_t>(0, max_tokens.value_or(0));
    scan.num_answers = std::max<int64_t>(1, int_of(fields[kN]).value_or(1));
    scan.priority = int_of(fields[kPriority]).value_or(0);

    if (kind == BodyKind::completion) {
        if (const std::optional<Form> form = read_prompt(fields[kPrompt], space, scan)) {
            append_chain(scan.keys, read_root(fields, *form, adapter_of, space, scan), space.data);
        }
    } else if (kind != BodyKind::other) {
        if (const std::optional<Form> form = read_conversation(fields, kind, space, conversation)) {
            const std::string_view data = space.data;
            scan.num_prompts = 1;
            scan.prompt_bytes = data.size();
            const uint64_t root = read_root(fields, *form, adapter_of, space, scan);
            const uint64_t opening = opening_key(root, data.substr(0, conversation.opening()));
            scan.keys.reserve(kKeyBytes * (1 + data.size() / kChunkBytes));
            scan.keys.append(reinterpret_cast<const char*>(&opening), sizeof opening);
            append_chain(scan.keys, root, data);
        }
    }
    return scan;
}

}  // namespace octavo::router
