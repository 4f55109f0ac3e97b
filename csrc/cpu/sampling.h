// From logits to tokens. One call a step; each row is a function of itself alone.
//
// What is done to a row x[0 .. V), in this order; every float operation is float32, unfused:
//
// 1. A NaN or +inf anywhere: status NotFinite. Raw log-probabilities, if wanted, are of x as it is
//    now: x[i] - max - log(total weight at temperature 1), in double, rounded to float32 last.
// 2. If the allowed list is not empty, all others become -inf; so does what a grammar's mask
//    leaves out, if the row has one. Bias is added in list order.
//    Repetition penalty p over all tokens before: x > 0 ? x / p : x * p. Then, for tokens among the
//    outputs, x - frequency * count, and x - presence. What is -inf stays so; nothing exceeds
//    FLT_MAX.
// 3. All -inf: status NothingAllowed. Temperature below 1e-5: the greatest, of equals the lowest
//    id.
// 4. t[i] = (x[i] - max) * (1 / temperature). Survivors are always the first n tokens in the order
//    (x descending, id ascending): min-p keeps t >= float(log(double(min_p))); top-k the first k of
//    them; top-p the fewest whose weights reach ceil(double(top_p) * double(sum of weights)), at
//    least one.
// 5. One draw among the survivors by their weights.
//
// Weights are whole numbers: exp(t) in units of 2^-42, rounded to nearest, ties to even. Sums of
// whole numbers do not depend on their order, so any split into lanes, blocks, threads or GPU warps
// draws the same token. exp is the polynomial in softmax_weights.h. With r the first two words of
// Philox (key = seed, counter = position), low word first, the point is the upper half of r * (sum
// of weights), and the token is the first, by ascending id, up to which the weights add up to more
// than the point.
//
// tests/kernels/sampling_reference.py is the same in slow numpy.
#pragma once

#include <cstdint>

namespace octavo {

class Team;

// One record a sequence; mirrors SAMPLING_ROW in octavo_engine/sampling/batch.py.
struct SamplingRow {
    uint64_t seed;
    float temperature, top_p, min_p;
    float repetition_penalty, frequency_penalty, presence_penalty;
    int32_t top_k;  // 0: all
    int32_t num_prompt_tokens;
};
static_assert(sizeof(SamplingRow) == 40);

enum class SampleStatus : uint8_t { Ok = 0, NotFinite = 1, NothingAllowed = 2 };

// A list per row of logits: row s has entries [starts[s], starts[s + 1]). No lists if starts is
// null.
struct RaggedView {
    const int32_t* starts = nullptr;
    const int32_t* ids = nullptr;  // ids out of range are passed over
    const float* values = nullptr;
};

// One bit a token, lowest first: what a grammar allows. Tokens beyond the last word are not.
struct MaskView {
    const int32_t* rows = nullptr;  // [num_rows]  which mask; -1: everything is allowed
    const uint32_t* bits = nullptr;
    int64_t num_words = 0;  // of one mask
};

struct SampleArgs {
    float* logits;  // [num_rows, vocab], changed in place
    int64_t num_rows, vocab;
    const SamplingRow* table;
    const int32_t* rows;       // [num_rows]  into table and history
    const int32_t* positions;  // [num_rows]  tokens before the one to choose
    const int32_t* targets;    // [num_rows]  -1: sample; otherwise the token to score
    const int32_t* history;    // [table rows, history_stride]
    int64_t history_stride;
    RaggedView bias, allowed;
    MaskView masks;
    RaggedView chosen;  // tokens whose log-probabilities are wanted, in place of the likeliest
    int num_logprobs;   // -1: none; no list of `chosen` is longer

    int32_t* tokens;  // [num_rows]  -1 unless the status is Ok
    uint8_t* status;
    float* logprobs;      // [num_rows], null if none are wanted, as the next three
    int32_t* ranks;       // 1 + number of logits greater than the token's
    int32_t* top_ids;     // [num_rows, num_logprobs], most likely first, of equals the lowest id,
    float* top_logprobs;  // or the chosen; ids are -1 where there are no more
};

constexpr int64_t kMaxVocab = int64_t{1} << 21;  // so that a sum of weights fits 64 bits

void sample(Team& team, const SampleArgs& args);

}  // namespace octavo
