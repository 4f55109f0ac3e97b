#include "step.h"

#include <algorithm>

#include "common/check.h"
#include "cpu/kernels.h"

namespace octavo {

using cpu::kBlockTokens;

namespace {

void check_size(const char* name, std::span<const int32_t> array, int64_t expected) {
    check(static_cast<int64_t>(array.size()) == expected, "step: ", name, " has ", array.size(),
          " entries; it must have ", expected);
}

void check_values(const char* name, std::span<const int32_t> array, int64_t end) {
    for (size_t i = 0; i < array.size(); ++i) {
        check(array[i] >= 0 && array[i] < end, "step: ", name, "[", i, "] is ", array[i],
              "; it must be between 0 and ", end - 1);
    }
}

// What attention over the group's layers reads must be blocks of the cache; before that the table
// may hold anything: those blocks were given back. The sequence's tokens must lie in the slots that
// the table names.
void check_table(const Step& step, const StepLimits& limits, int64_t group, int64_t seq) {
    const auto at = static_cast<size_t>(seq);
    const int64_t begin = step.seq_starts[at];
    const int64_t end = step.seq_starts[at + 1];
    const int64_t length = step.seq_lens[at];
    const int64_t window = limits.windows[static_cast<size_t>(group)];
    const int64_t first = length - (end - begin);  // position of the first token
    const int64_t seen_from = window > 0 ? std::max<int64_t>(0, first + 1 - window) : 0;
    const int64_t num_blocks = (length + kBlockTokens - 1) / kBlockTokens;
    const int32_t* table = step.block_table(group, seq);
    for (int64_t i = seen_from / kBlockTokens; i < num_blocks; ++i) {
        check(table[i] >= 0 && table[i] < limits.num_blocks, "step: block_tables[", group, "][",
              step.rows[at], "][", i, "] is ", table[i], "; the cache has ", limits.num_blocks,
              " blocks");
    }
    const int32_t* slots = step.slots_of(group);
    for (int64_t token = begin; token < end; ++token) {
        const int64_t position = first + token - begin;
        const int64_t slot =
            table[position / kBlockTokens] * kBlockTokens + position % kBlockTokens;
        check(slots[token] == slot, "step: slots[", group, "][", token, "] is ", slots[token],
              "; by block_tables it must be ", slot);
    }
}

// One sequence's tokens must be its last ones.
void check_seq(const Step& step, const StepLimits& limits, int64_t seq) {
    const auto at = static_cast<size_t>(seq);
    const int64_t begin = step.seq_starts[at];
    const int64_t end = step.seq_starts[at + 1];
    const int64_t length = step.seq_lens[at];
    check(begin <= end, "step: seq_starts[", seq + 1, "] is ", end, ", before seq_starts[", seq,
          "], which is ", begin);
    check(end <= step.num_tokens(), "step: seq_starts[", seq + 1, "] is ", end, ", but there are ",
          step.num_tokens(), " tokens");
    check(!limits.is_whole || (end > begin && length == end - begin), "step: sequence ", seq,
          " has ", end - begin, " of its ", length, " tokens; this program takes whole ones only");
    check(length >= end - begin, "step: seq_lens[", seq, "] is ", length, ", but the step has ",
          end - begin, " tokens of that sequence");
    const int64_t num_blocks = (length + kBlockTokens - 1) / kBlockTokens;
    check(num_blocks <= step.table_cols, "step: seq_lens[", seq, "] is ", length, ", which takes ",
          num_blocks, " blocks; block_tables has ", step.table_cols, " columns");
    for (int64_t token = begin; token < end; ++token) {
        const auto t = static_cast<size_t>(token);
        const int64_t position = length - end + token;
        check(step.positions[t] == position, "step: positions[", token, "] is ", step.positions[t],
              "; by seq_starts and seq_lens it must be ", position);
    }
    for (int64_t group = 0; group < step.num_groups; ++group) {
        check_table(step, limits, group, seq);
    }
}

// Later tokens that a token sees must be written in this step, and a token sees as far as the one
// before it: attention takes rows together.
void check_seen(const Step& step, int64_t seq) {
    const auto at = static_cast<size_t>(seq);
    const int64_t length = step.seq_lens[at];
    int64_t before = 0;
    for (int64_t token = step.seq_starts[at]; token < step.seq_starts[at + 1]; ++token) {
        const auto t = static_cast<size_t>(token);
        const int64_t own = step.positions[t] + 1;
        const int64_t end = step.seen_to[t] == 0 ? own : step.seen_to[t];
        check(end >= own && end >= before && end <= length, "step: seen_to[", token, "] is ",
              step.seen_to[t], "; it must be 0, or between ", std::max(own, before), " and ",
              length);
        before = end;
    }
}

void check_segments(const Step& step) {
    const std::span<const int32_t> starts = step.segment_starts;
    check(step.num_seqs() == 1 && starts.front() == 0 && starts.back() == step.num_tokens(),
          "step: segment_starts must be of one sequence, from 0 to its ", step.num_tokens(),
          " tokens");
    for (size_t i = 1; i < starts.size(); ++i) {
        check(starts[i] > starts[i - 1], "step: segment_starts[", i, "] is ", starts[i],
              "; it must be above ", starts[i - 1]);
    }
}

void check_inputs(const Step& step, const StepLimits& limits) {
    check(!limits.is_input || !step.input_rows.empty() || step.num_tokens() == 0,
          "step: this program takes rows from outside only; input_rows is missing");
    if (step.input_rows.empty()) {
        return;
    }
    check_size("input_rows", step.input_rows, step.num_tokens());
    check(step.input_cols == limits.input_cols, "step: inputs has ", step.input_cols,
          " columns; the program takes ", limits.input_cols);
    const int32_t least = limits.is_input ? 0 : -1;
    for (size_t i = 0; i < step.input_rows.size(); ++i) {
        check(step.input_rows[i] >= least && step.input_rows[i] < step.num_inputs,
              "step: input_rows[", i, "] is ", step.input_rows[i], "; inputs has ", step.num_inputs,
              " rows");
    }
}

}  // namespace

void check_step(const Step& step, const StepLimits& limits) {
    const int64_t tokens = step.num_tokens();
    const int64_t seqs = step.num_seqs();
    check(tokens <= limits.max_tokens, "step: ", tokens, " tokens; the program was planned for ",
          limits.max_tokens);
    check(step.num_logit_rows() <= limits.max_logit_rows, "step: ", step.num_logit_rows(),
          " logit_rows; the program was planned for ", limits.max_logit_rows);
    check_size("positions", step.positions, tokens);
    check(step.num_groups == static_cast<int64_t>(limits.windows.size()),
          "step: block_tables are of ", step.num_groups, " groups; the cache has ",
          limits.windows.size());
    check_size("slots", step.slots, step.num_groups * tokens);
    check_size("seq_starts", step.seq_starts, seqs + 1);
    check_size("rows", step.rows, seqs);
    check(step.seq_starts.front() == 0, "step: seq_starts[0] is ", step.seq_starts.front(),
          "; it must be 0");
    check(step.seq_starts.back() == tokens, "step: seq_starts ends at ", step.seq_starts.back(),
          ", but there are ", tokens, " tokens");
    check_values("token_ids", step.token_ids, limits.vocab_size);
    check_values("positions", step.positions, limits.max_positions);
    if (!step.type_ids.empty()) {
        check_size("type_ids", step.type_ids, tokens);
        check_values("type_ids", step.type_ids, limits.num_types);
    }
    if (!step.adapters.empty()) {
        check_size("adapters", step.adapters, seqs);
        for (size_t i = 0; i < step.adapters.size(); ++i) {
            check(step.adapters[i] >= -1 && step.adapters[i] < limits.num_adapter_slots,
                  "step: adapters[", i, "] is ", step.adapters[i], "; there are ",
                  limits.num_adapter_slots, " slots");
        }
    }
    check_inputs(step, limits);
    if (limits.is_pooled) {
        check_size("logit_rows", step.logit_rows, seqs);
    }
    check_values("rows", step.rows, step.table_rows);
    check_values("logit_rows", step.logit_rows, tokens);
    if (!step.segment_starts.empty()) {
        check_segments(step);
    }
    if (!step.rope_positions.empty()) {
        check_size("rope_positions", step.rope_positions, cpu::kRopeAxes * tokens);
        check_values("rope_positions", step.rope_positions, limits.max_positions);
    }
    if (!step.seen_to.empty()) {
        check_size("seen_to", step.seen_to, tokens);
    }
    for (int64_t seq = 0; seq < seqs; ++seq) {
        check_seq(step, limits, seq);
        if (!step.seen_to.empty()) {
            check_seen(step, seq);
        }
    }
}

}  // namespace octavo
