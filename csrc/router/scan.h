// Reads a request's body once: what the router must know of it, and its prompt's route keys.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace octavo::router {

enum class BodyKind { chat = 0, completion = 1, other = 2, messages = 3, responses = 4 };

// See octavo_router/residency/api.py.
struct Scan {
    std::string model;
    std::string user;
    std::string cache_salt;
    std::string session;
    std::string keys;
    int64_t max_tokens = 0;
    int64_t num_answers = 1;
    int64_t priority = 0;
    size_t model_start = 0;
    size_t model_end = 0;
    size_t num_prompts = 0;
    size_t prompt_bytes = 0;
    size_t num_prompt_ids = 0;
    bool stream = false;
    bool include_usage = false;
    bool is_privileged = false;
};

// The content of the adapter that a model's name means: "" for none.
using AdapterOf = std::function<std::string(const std::string&)>;

// Throws ScanFailure. `adapter_of` may be empty.
Scan scan(std::string_view body, BodyKind kind, const AdapterOf& adapter_of);

}  // namespace octavo::router
