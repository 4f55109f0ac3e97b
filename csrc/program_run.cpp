// Running a program: what the step fills in, and how the team shares each instruction.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/check.h"
#include "common/overloaded.h"
#include "program.h"

namespace octavo {

namespace {

// States of partitions that are merged later may take so much, of memory that is taken where it is
// written: 32 sequences of Llama 3 8B's shape may have 64k tokens in common.
constexpr int64_t kPartialFloats = int64_t{1} << 24;

constexpr int64_t kPartsPerWorker = 16;  // of a large product: the last one is waited for

const int32_t* ids_of(const Step& step, cpu::EmbedOf of) {
    switch (of) {
        case cpu::EmbedOf::Positions:
            return step.positions.data();
        case cpu::EmbedOf::Types:
            return step.type_ids.empty() ? nullptr : step.type_ids.data();
        case cpu::EmbedOf::Tokens:
            break;
    }
    return step.token_ids.data();
}

// By the clock of Python's time.perf_counter_ns.
int64_t now_ns() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// The rows of `dst` that the step brings, from its column `first` on.
void take_inputs(const cpu::Matrix& dst, const Step& step, Range rows, int64_t first = 0) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int32_t input = step.input_rows[static_cast<size_t>(r)];
        if (input >= 0) {
            std::memcpy(dst.row(r), step.inputs + input * step.input_cols + first,
                        static_cast<size_t>(dst.cols) * sizeof(float));
        }
    }
}

// As before, and zeros where it brings none.
void take_sparse_inputs(const cpu::Matrix& dst, const Step& step, Range rows, int64_t first) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        std::memset(dst.row(r), 0, static_cast<size_t>(dst.cols) * sizeof(float));
    }
    if (!step.input_rows.empty() && first + dst.cols <= step.input_cols) {
        take_inputs(dst, step, rows, first);
    }
}

}  // namespace

namespace {

// A unit at a time for whoever is free: the sequences of a step differ in length.
template <class Op, class Kernel>
void scan(const Op& op, const Step& step, std::atomic<int64_t>& next_part, Kernel kernel) {
    auto args = op.args;
    const StateCache& states = *step.states;
    args.state = {
        states.layer(op.layer),  states.stride(),
        step.state_slots.data(), step.state_saves.empty() ? nullptr : step.state_saves.data(),
        step.seq_starts.data(),  step.seq_lens.data()};
    const int64_t num_units = step.num_seqs() * args.units();
    while (true) {
        const int64_t unit = next_part.fetch_add(1, std::memory_order_relaxed);
        if (unit >= num_units) {
            return;
        }
        kernel(args, unit, unit + 1);
    }
}

}  // namespace

void Program::run(const KVCache& kv, const Step& given, const KVCache* cross) {
    Step step = given;
    prepare(kv, step, cross);
    if (!step.op_times.empty()) {
        const auto num_ops = static_cast<size_t>(
            std::ranges::count_if(instructions_, [](const Instruction& instruction) {
                return !std::holds_alternative<Quantize>(instruction.args) &&
                       !std::holds_alternative<Shrink>(instruction.args);
            }));
        check(step.op_times.size() == num_ops + 1, "run: op_times must hold ", num_ops + 1,
              " times; got ", step.op_times.size());
        std::ranges::fill(step.op_times, 0);
        step.op_times[0] = now_ns();
    }
    team_.run([&](int worker) { run_worker(kv, step, worker); });
    check_ranks();
}

void Program::check_ranks() const {
    for (const Ranks* ranks : {ranks_, peers_}) {
        if (ranks != nullptr && ranks->failed() >= 0) {
            throw std::runtime_error("rank " + std::to_string(ranks->failed()) + " of " +
                                     std::to_string(ranks->size()) + " has failed");
        }
    }
}

// All that may fail, before the team starts.
void Program::prepare(const KVCache& kv, Step& step, const KVCache* cross) {
    limits_.num_blocks = kv.num_blocks();
    limits_.windows = kv.windows();
    check_step(step, limits_);
    place_adapters(step);
    place_cross(step, cross);
    check_states(step);
    for (const Instruction& instruction : instructions_) {
        if (const auto* attention = std::get_if<Attention>(&instruction.args)) {
            check_cache(*attention, kv);
        } else if (const auto* latent = std::get_if<LatentAttention>(&instruction.args)) {
            check_cache(latent->attention, kv);
        }
    }
    make_room();
    next_part_[0].store(0, std::memory_order_relaxed);
    for (AttentionPlan& plan : plans_) {
        plan.build(step, team_.num_threads(), reinterpret_cast<float*>(partials_.data()),
                   kPartialFloats);
    }
}

void Program::make_room() {
    const int64_t num_threads = team_.num_threads();
    if (scratch_.size() < scratch_bytes_ * num_threads) {
        scratch_bytes_ = (scratch_bytes_ + 4095) / 4096 * 4096;  // no cache line of two workers
        scratch_ = Memory(scratch_bytes_ * num_threads);
    }
    if (quantized_.size() < quantized_bytes_) {
        quantized_ = ranks_ == nullptr ? Memory(quantized_bytes_) : ranks_->share(quantized_bytes_);
    }
    const int64_t copies = 2 * copy_bytes_ * num_threads;
    if (copies_.size() < copies) {
        copies_ = Memory(copies);
    }
    if (!plans_.empty() && partials_.size() == 0) {
        partials_ = Memory(kPartialFloats * 4);
    }
}

Program::Share Program::all(int worker) const {
    const int threads = team_.num_threads();
    return ranks_ == nullptr ? Share{worker, threads}
                             : Share{ranks_->rank() * threads + worker, ranks_->size() * threads};
}

// Once a rank has failed nobody waits any more, and what is left of the step computes nonsense;
// `run` says so. What indexes memory is each process's own, so that nonsense stays within bounds.
void Program::meet() {
    if (ranks_ == nullptr) {
        team_.barrier();
    } else {
        ranks_->barrier();
    }
}

// The slot of each row, and the rows that have one.
void Program::place_adapters(const Step& step) {
    for (RowSlots& rows : row_slots_) {
        rows.slots.clear();
        rows.adapted.clear();
    }
    if (std::ranges::all_of(step.adapters, [](int32_t slot) { return slot < 0; })) {
        return;
    }
    auto& tokens = row_slots_[static_cast<size_t>(Rows::Tokens)].slots;
    for (size_t seq = 0; seq < step.adapters.size(); ++seq) {
        const int32_t slot = step.adapters[seq];
        check(slot < 0 || adapters_->is_set(slot), "step: adapters[", seq, "] is slot ", slot,
              ", which is empty");
        const int32_t count = step.seq_starts[seq + 1] - step.seq_starts[seq];
        tokens.insert(tokens.end(), static_cast<size_t>(count), slot);
    }
    auto& selected = row_slots_[static_cast<size_t>(Rows::Selected)].slots;
    for (const int32_t token : step.logit_rows) {
        selected.push_back(tokens[static_cast<size_t>(token)]);
    }
    for (RowSlots& rows : row_slots_) {
        for (size_t row = 0; row < rows.slots.size(); ++row) {
            if (rows.slots[row] >= 0) {
                rows.adapted.push_back(static_cast<int32_t>(row));
            }
        }
        std::ranges::stable_sort(rows.adapted, {},
                                 [&](int32_t row) { return rows.slots[static_cast<size_t>(row)]; });
    }
}

void Program::check_cache(const Attention& attention, const KVCache& kv) const {
    if (attention.args.has_queries_only) {
        check_cross_layer(attention.args, attention.layer);
        return;
    }
    check(attention.layer < kv.num_layers(), "run: attention of layer ", attention.layer,
          ", but the KV cache has ", kv.num_layers());
    const cpu::KVLayer& wanted = attention.args.kv;
    const cpu::KVLayer& have = kv.layer(attention.layer);
    check(wanted.num_kv_heads == have.num_kv_heads && wanted.head_dim == have.head_dim &&
              wanted.latent_rank == have.latent_rank,
          "run: attention of ", wanted.num_kv_heads, " KV heads of ", wanted.head_dim,
          " columns, but the KV cache has ", have.num_kv_heads, " of ", have.head_dim, " in layer ",
          attention.layer);
    const int64_t group = plans_[attention.plan].shape().group;
    check(group == kv.group(attention.layer), "run: attention of layer ", attention.layer,
          " is of group ", group, ", but in the KV cache of group ", kv.group(attention.layer));
    const int64_t held = kv.windows()[static_cast<size_t>(group)];
    const int64_t seen = attention.args.window;
    check(held == 0 || (seen > 0 && seen <= held), "run: attention of layer ", attention.layer,
          " sees ", seen, " tokens (0: all), but its group's blocks hold ", held);
}

void Program::run_worker(const KVCache& kv, const Step& step, int worker) {
    const cpu::Kernels& kernels = team_.kernels();
    const Share share = all(worker);
    struct {
        const std::byte* of = nullptr;
        std::byte* rows = nullptr;
    } copied;  // the rows that this worker has a copy of
    const auto own_or = [&](std::byte* rows) { return rows == copied.of ? copied.rows : rows; };
    bool heads_are_ready = false;  // of the attention behind
    size_t turn = 0;
    size_t op = 0;  // as the caller counts: rows are quantised for the product behind
    const auto first = static_cast<size_t>(step.first_instruction);
    const auto end = static_cast<size_t>(step.end_instruction);
    for (size_t index = first; index < end; ++index) {
        const Instruction& instruction = instructions_[index];
        const bool is_quantize = std::holds_alternative<Quantize>(instruction.args);
        const bool is_shrink = std::holds_alternative<Shrink>(instruction.args);
        op += is_quantize || is_shrink ? 0 : 1;
        const int64_t count =
            instruction.rows == Rows::Tokens ? step.num_tokens() : step.num_logit_rows();
        if (count == 0) {
            continue;
        }
        const bool shares_rows = count > kOwnRows;
        const RowSlots& slots = slots_of(instruction.rows);
        if ((!shares_rows && is_quantize) || (is_shrink && slots.adapted.empty())) {
            continue;
        }
        std::atomic<int64_t>& next_part = next_part_[turn];
        turn = 1 - turn;
        if (worker == 0) {  // all are past the instruction before, and none is at the next one
            next_part_[turn].store(0, std::memory_order_relaxed);
        }
        const Range rows = split(count, share.worker, share.workers);
        const auto compute = [&](const auto& args, auto kernel, bool is_converted = false) {
            if (shares_rows || !instruction.is_copied) {
                kernel(args, rows.begin, rows.end);
                return;
            }
            std::byte* const copy = copy_of(worker, is_converted);
            compute_copy(args, kernel, count, rows, copy);
            copied = {args.dst.data, copy};
        };
        std::visit(
            Overloaded{
                [&](const Embed& embed) { embed_rows(embed, step, count, worker); },
                [&](const cpu::NormArgs& args) { compute(args, kernels.rms_norm); },
                [&](const LayerNorm& norm) { compute(norm.args, kernels.layer_norm); },
                [&](const Quantize& quantize) {
                    kernels.quantize_rows(quantize.args, rows.begin, rows.end, quantized_.data());
                },
                [&](const Shrink& shrink) {
                    cpu::ShrinkArgs args = shrink.args;
                    args.slots = slots.slots.data();
                    args.rows = slots.adapted.data();
                    args.src.data = own_or(args.src.data);
                    const auto num_adapted = static_cast<int64_t>(slots.adapted.size());
                    const Range mine = split(num_adapted, share.worker, share.workers);
                    kernels.shrink(args, mine.begin, mine.end, scratch(worker));
                },
                [&](Product product) {
                    cpu::LinearArgs& args = product.args;
                    args.num_rows = count;
                    if (args.adapters != nullptr && !slots.adapted.empty()) {
                        args.slots = slots.slots.data();
                    }
                    if (shares_rows && args.weight.is_quantized()) {
                        args.quantized = quantized_.data();
                    }
                    args.src.data = own_or(args.src.data);
                    copied = {};
                    multiply(product, next_part, worker);
                    if (!shares_rows && instruction.prepares_heads && index + 1 < end) {
                        const auto& next = std::get<Attention>(instructions_[index + 1].args);
                        prepare_own_heads(step_args(next, kv, step), count, worker);
                        heads_are_ready = true;
                    }
                },
                [&](cpu::RowOpArgs args) {
                    const bool is_select = args.op == cpu::RowOp::Select;
                    args.rows = is_select ? step.logit_rows.data() : nullptr;
                    args.src.data = own_or(args.src.data);
                    compute(args, kernels.row_op, true);
                },
                [&](const Join& join) {
                    kernels.row_op(join.left, rows.begin, rows.end);
                    kernels.row_op(join.right, rows.begin, rows.end);
                },
                [&](const Gate& gate) {
                    cpu::RowOpArgs args = gate.scale;
                    for (int64_t r = rows.begin; r < rows.end; ++r) {
                        const float score = *reinterpret_cast<const float*>(gate.scores.row(r));
                        args.factor = 1.0F / (1.0F + exp_of(-score));
                        kernels.row_op(args, r, r + 1);
                    }
                },
                [&](cpu::PoolArgs args) {
                    args.seq_starts = step.seq_starts.data();
                    kernels.pool(args, rows.begin, rows.end);
                },
                [&](const Attention& attention) {
                    attend(attention, kv, step, next_part, worker, heads_are_ready);
                    heads_are_ready = false;
                },
                [&](const LatentAttention& op) { attend_latents(op, kv, step, next_part, worker); },
                [&](const Moe& moe) { run_moe(moe, count, worker); },
                [&](const StoreCross& store) { run_instruction(store, step, worker); },
                [&](const Features& features) { run_instruction(features, step, rows); },
                [&](const Mix& mix) { run_instruction(mix, rows); },
                [&](const MatchRms& match) { run_instruction(match, rows); },
                [&](const Sparsify& sparsify) { run_instruction(sparsify, rows); },
                [&](const ScaleColumns& scale) { run_instruction(scale, rows); },
                [&](const Shift& shift) {
                    cpu::RowOpArgs args = shift.args;
                    args.rows = shifted_rows_.data();
                    kernels.row_op(args, rows.begin, rows.end);
                },
                [&](const cpu::GroupNormArgs& args) {
                    kernels.group_norm(args, rows.begin, rows.end);
                },
                [&](const Recurrent<cpu::ConvArgs>& conv) {
                    scan(conv, step, next_part, kernels.short_conv);
                },
                [&](const Recurrent<cpu::SsdArgs>& ssd) {
                    scan(ssd, step, next_part, kernels.ssd_scan);
                },
                [&](const Recurrent<cpu::DeltaArgs>& delta) {
                    scan(delta, step, next_part, kernels.delta_rule);
                },
                [&](const Recurrent<cpu::SelectiveArgs>& selective) {
                    scan(selective, step, next_part, kernels.selective_scan);
                },
            },
            instruction.args);
        if (needs_meeting(index, end, !shares_rows)) {
            meet();
        }
        if (worker == 0 && !is_quantize && !is_shrink && !step.op_times.empty()) {
            step.op_times[op] = now_ns();
        }
    }
}

// A rank that has some of the table's rows looks up the tokens that are among them.
void Program::embed_rows(const Embed& embed, const Step& step, int64_t count, int worker) {
    cpu::EmbedArgs args = embed.args;
    args.ids = ids_of(step, args.of);
    if (embed.is_input) {
        const Share share = all(worker);
        const Range rows = split(count, share.worker, share.workers);
        if (embed.is_sparse) {
            take_sparse_inputs(args.dst, step, rows, embed.first);
        } else {
            take_inputs(args.dst, step, rows, embed.first);
        }
        return;
    }
    const Share share = embed.is_cut ? own(worker) : all(worker);
    const Range rows = split(count, share.worker, share.workers);
    if (!embed.is_cut) {
        team_.kernels().embed(args, rows.begin, rows.end);
        const bool is_replaced = args.of == cpu::EmbedOf::Tokens && !limits_.is_input;
        if (is_replaced && !step.input_rows.empty()) {
            take_inputs(args.dst, step, rows);
        }
        return;
    }
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t id = args.ids[r] + args.offset;
        if (id >= 0 && id < args.table.rows) {
            team_.kernels().embed(args, r, r + 1);
        }
    }
}

// A few rows: each worker streams its share of the weights. Many: blocks of rows times some units,
// for whoever is free, so that a core that others use too holds up none.
void Program::multiply(const Product& product, std::atomic<int64_t>& next_part, int worker) {
    const cpu::LinearArgs& args = product.args;
    const cpu::Kernels& kernels = team_.kernels();
    const Share share = product.is_cut ? own(worker) : all(worker);
    const int64_t workers = share.workers;
    const bool is_of_many = workers > team_.num_threads();  // of whom each counts for itself
    const int64_t block = kernels.linear_block_rows(args.weight);
    const int64_t num_blocks = (args.num_rows + block - 1) / block;
    if (num_blocks == 1 || workers == 1 || is_of_many) {
        const Range units = split(args.units(), share.worker, workers);
        kernels.linear(args, units.begin, units.end, scratch(worker));
        return;
    }
    // A multiple of the workers: undisturbed, they end together.
    const int64_t wanted = (kPartsPerWorker + num_blocks - 1) / num_blocks * workers;
    const int64_t pairs = (args.units() + 1) / 2;  // kernels take two units at a time
    const int64_t parts_of_block = std::min(wanted, pairs);
    while (true) {
        const int64_t part = next_part.fetch_add(1, std::memory_order_relaxed);
        if (part >= num_blocks * parts_of_block) {
            return;
        }
        const int64_t first = part / parts_of_block * block;
        cpu::LinearArgs of_block = args;
        of_block.num_rows = std::min(block, args.num_rows - first);
        of_block.src.data = args.src.row(first);
        if (args.quantized != nullptr) {
            of_block.quantized = args.quantized + first * kernels.quantized_row_bytes(args);
        }
        of_block.dst.data = args.dst.row(first);
        if (args.slots != nullptr) {
            of_block.slots = args.slots + first;
            of_block.u.data = args.u.row(first);
        }
        const Range mine = split(pairs, part % parts_of_block, parts_of_block);
        kernels.linear(of_block, 2 * mine.begin, std::min(2 * mine.end, args.units()),
                       scratch(worker));
    }
}

void Program::attend(const Attention& attention, const KVCache& kv, const Step& step,
                     std::atomic<int64_t>& next_part, int worker, bool is_prepared) {
    const cpu::AttentionArgs args = step_args(attention, kv, step);
    if (!is_prepared) {
        const int64_t num_units = step.num_tokens() * args.head_units();
        const Range units = split(num_units, worker, team_.num_threads());
        team_.kernels().prepare_heads(args, units.begin, units.end);
        team_.barrier();
    }
    attend_tiles(attention, args, next_part, worker);
}

cpu::AttentionArgs Program::step_args(const Attention& attention, const KVCache& kv,
                                      const Step& step) const {
    cpu::AttentionArgs args = attention.args;
    args.q = reinterpret_cast<float*>(queries_.data());
    const auto& shape = plans_[attention.plan].shape();
    args.kv = (shape.cross_length > 0 ? *cross_ : kv).layer(attention.layer);
    args.positions = step.positions.data();
    args.slots = step.slots_of(shape.group);
    if (!step.rope_positions.empty()) {
        args.rope_positions = step.rope_positions.data();
        args.num_tokens = step.num_tokens();
    }
    args.seen_to = step.seen_to.empty() ? nullptr : step.seen_to.data();
    return args;
}

// Once all queries, keys and values of the step are in place.
void Program::attend_tiles(const Attention& attention, const cpu::AttentionArgs& args,
                           std::atomic<int64_t>& next_part, int worker) {
    const cpu::Kernels& kernels = team_.kernels();
    const int workers = team_.num_threads();
    const AttentionPlan& plan = plans_[attention.plan];
    const std::vector<cpu::QueryTile>& tiles = plan.tiles();
    // Items over latent vectors are alike, and read so much that a worker takes the next one before
    // it begins, and fetches what that begins with meanwhile.
    const bool knows_next = args.kv.is_latent() && args.window == 0;
    const auto take = [&]() -> const cpu::AttendItem* {
        const auto next = static_cast<size_t>(next_part.fetch_add(1, std::memory_order_relaxed));
        return next < plan.items().size() ? &plan.items()[next] : nullptr;
    };
    const cpu::AttendItem* item = take();
    while (item != nullptr) {
        const cpu::AttendItem* next = knows_next ? take() : nullptr;
        kernels.attend(args, tiles[static_cast<size_t>(item->tile)], item->partition,
                       next == nullptr ? cpu::NextKeys{} : plan.first_keys(*next), scratch(worker));
        item = knows_next ? next : take();
    }
    if (!plan.has_states()) {
        return;
    }
    team_.barrier();
    const Range mine = split(static_cast<int64_t>(tiles.size()), worker, workers);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        const cpu::QueryTile& tile = tiles[static_cast<size_t>(i)];
        if (tile.states != nullptr && !tile.is_shared()) {
            kernels.merge(args, tile, scratch(worker));
        }
    }
}

}  // namespace octavo
