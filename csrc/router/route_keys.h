// Route keys as octavo_engine/protocol/route_keys.py defines them, straight from the body's bytes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "router/json_reader.h"

namespace octavo::router {

inline constexpr std::string_view kRouteKeysVersion = "octavo-route-3";
inline constexpr size_t kChunkBytes = 64;
inline constexpr size_t kKeyBytes = 8;

enum class Form { chat, text, ids, messages, responses };

// Fields outside of the conversation that shape a prompt; `root_key` knows which form has which.
enum RootField : size_t {
    kTools,
    kDocuments,
    kChatTemplate,
    kChatTemplateKwargs,
    kReasoningEffort,
    kMmProcessorKwargs,
    kAddSpecialTokens,
    kTruncatePromptTokens,
    kTruncationSide,
    kThinking,
    kOutputConfig,
    kReasoning,
    kNumRootFields,
};
inline constexpr std::array<std::string_view, kNumRootFields> kRootFieldNames = {
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "mm_processor_kwargs",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "thinking",
    "output_config",
    "reasoning"};

struct RootParts {
    std::string_view adapter;
    std::string_view salt;
    std::array<Raw, kNumRootFields> fields;
    bool hides_tools = false;  // tool_choice is "none"
};

// What the root comes to, and how many bytes of it are tools and documents.
uint64_t root_key(Form form, const RootParts& parts, KeyStack& keys, size_t* prompt_bytes);

// The key of what comes before a chat's first text.
uint64_t opening_key(uint64_t root, std::string_view opening);
// Appends to `out` the packed keys of all whole chunks.
void append_chain(std::string& out, uint64_t root, std::string_view data);

// A list of messages becomes data while it is read. What is no conversation is read all the same.
class Conversation {
  public:
    explicit Conversation(KeyStack& keys) : keys_(&keys) {}
    // At the opening bracket of the list.
    void read(Reader& reader, int depth, std::string& data);
    // The other shapes' conversations, from values that were read before.
    void read_turns(const Raw& system, const Raw& messages, std::string& data);
    void read_items(const Raw& instructions, const Raw& input, std::string& data);
    bool is_valid() const { return is_valid_; }
    // Where in the data the first text begins; 0 without one.
    size_t opening() const { return opening_; }

  private:
    struct Message;
    struct Part;
    void append(const Message& message, std::string& data);
    void append_opening(const Raw& text, std::string& data);
    void append_turn(const Raw& message, std::string& data);
    void append_item(const Raw& item, std::string& data);
    // Whether it has the form of a content.
    bool append_content(const Raw& content, bool has_blocks, std::string& data);
    void append_string(const Raw& string, std::string& data);
    void append_parts(const Raw& content, bool has_blocks, std::string& data);
    bool append_block(const Part& part, std::string& data);
    void append_media(const Raw& value, std::string& data);
    // A part that is no text. By its uuid where it has one, whether it brings its file or not.
    void append_media_part(const Part& part, std::string& data);
    void append_packed_digest(std::string& data);
    void note_part(const std::string& data);
    void append_field(std::string_view name, const Raw& value, std::string& data);

    KeyStack* keys_;
    std::string packed_;
    size_t opening_ = 0;
    char separator_ = '\xfd';  // between the parts of a content
    bool is_valid_ = true;
};

// Appends the token ids of a list, u32 each. False if it holds anything else; `num_items` in any
// case.
bool append_ids(const Raw& list, KeyStack& keys, std::string& data, size_t* num_items);

// Null, and strings, lists and objects without anything in them.
bool is_absent(const Raw& value);
// Whether it is written as an integer, which it is then.
bool is_integer(const Raw& value);
// Appends a value so that all its spellings look alike.
void pack_value(std::string& out, const Raw& value, KeyStack& keys);

}  // namespace octavo::router
