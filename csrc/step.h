// What one step computes, as flat arrays; the same as backends.backend.Step in Python.
#pragma once

#include <cstdint>
#include <span>

#include "state_cache.h"

namespace octavo {

struct Step {
    std::span<const int32_t> token_ids;   // [T]
    std::span<const int32_t> positions;   // [T]
    std::span<const int32_t> slots;       // [G, T]
    std::span<const int32_t> seq_starts;  // [B + 1]
    std::span<const int32_t> seq_lens;    // [B]
    std::span<const int32_t> rows;        // [B]
    const int32_t* block_tables;          // [G, table_rows, table_cols]
    int64_t num_groups;
    int64_t table_rows;
    int64_t table_cols;
    std::span<const int32_t> logit_rows;     // [S]
    std::span<const int32_t> type_ids;       // [T], or empty: all zero
    std::span<const int32_t> adapters = {};  // [B] slots, -1: none; or empty: none at all
    // Where the recurrent state of each sequence is read and left [B], and where it is saved too
    // behind a token [T], -1: nowhere; empty: nothing is saved.
    StateCache* states = nullptr;
    std::span<const int32_t> state_slots = {};
    std::span<const int32_t> state_saves = {};
    // Rows that come from outside instead of a table, such as a picture's: of each token its row of
    // `inputs`, -1: none; or empty: none at all.
    std::span<const int32_t> input_rows = {};  // [T]
    const float* inputs = nullptr;             // [num_inputs, input_cols]
    int64_t num_inputs = 0;
    int64_t input_cols = 0;
    // Of each token the position behind the last one that it sees, where later ones are among them:
    // it and they belong to one picture. 0: it sees none behind itself; or empty: no token does.
    std::span<const int32_t> seen_to = {};  // [T]
    // Of each token where ropes of several axes turn it to on each; empty: all where it stands.
    std::span<const int32_t> rope_positions = {};  // [3, T]
    // Where the parts of the step's one sequence begin that layers of segments see each by itself,
    // and its end; empty: it is one part.
    std::span<const int32_t> segment_starts = {};  // [segments + 1]
    std::span<const float> features = {};          // [T, columns] of programs that read some
    // [B] where in the cross cache each sequence's keys and values are; empty: no cross-attention.
    std::span<const int32_t> cross_slots = {};
    // [slots, blocks]: blocks of each slot of the cross cache; the program fills it in.
    std::span<const int32_t> cross_tables = {};
    int64_t cross_blocks = 0;  // of a slot
    // Instructions to run, to go on with later; without an end: all.
    int64_t first_instruction = 0;
    int64_t end_instruction = -1;
    // When the step began, then when each instruction was done; empty: nobody asks. Instructions
    // without rows stay 0.
    std::span<int64_t> op_times = {};

    int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
    int64_t num_seqs() const { return static_cast<int64_t>(seq_lens.size()); }
    int64_t num_logit_rows() const { return static_cast<int64_t>(logit_rows.size()); }
    const int32_t* block_table(int64_t group, int64_t seq) const {
        return block_tables + (group * table_rows + rows[static_cast<size_t>(seq)]) * table_cols;
    }
    const int32_t* cross_table(int64_t seq) const {
        return cross_tables.data() + cross_slots[static_cast<size_t>(seq)] * cross_blocks;
    }
    const int32_t* slots_of(int64_t group) const { return slots.data() + group * num_tokens(); }
};

// The largest values that a program can take.
struct StepLimits {
    int64_t max_tokens;
    int64_t max_logit_rows;
    int64_t vocab_size;     // of the smallest embedding table
    int64_t max_positions;  // of the shortest cos_sin or position table
    int64_t num_blocks;     // of the KV cache
    int64_t num_types;      // of the smallest table of token types
    int64_t num_adapter_slots;
    bool is_whole;                          // each sequence from its first token on
    bool is_pooled;                         // one logit row for each sequence
    std::span<const int64_t> windows = {};  // of the cache's groups: tokens that they hold; 0: all
    int64_t input_cols = 0;                 // that rows from outside must have; 0: none are taken
    bool is_input = false;                  // all rows come from outside
};

// Throws ValueError unless the arrays agree with one another and with the limits: a wrong index
// would otherwise read or write anywhere.
void check_step(const Step& step, const StepLimits& limits);

}  // namespace octavo
