// A mixture of experts: each token's rows are gathered by expert, computed there, and summed.
//
// Every product is an ordinary linear of some rows, which do not depend on their company, and the
// sum is in the order of the token's own scores: so a token's bits depend on nothing but itself.
//
// Ranks either have some columns of every expert, or some experts as a whole. What an expert takes
// and gives lies in memory that all ranks see, so nothing is sent to its owner, or back.
//
// Peers have tokens of their own. Each shows its tokens and the experts that they chose; all place
// the tokens of all, one rank's behind another's, and an expert's owner gathers its rows from
// there.
//
// Which expert is in which slot, and so on which rank, may change between steps: move_experts.
#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "program.h"

namespace octavo {

using cpu::Matrix;

namespace {

// For pieces of experts that move; a piece of each of kMaxSlots must be 64 bytes at least.
constexpr int64_t kMovedBytes = int64_t{8} << 20;
static_assert(kMovedBytes / kMaxSlots >= 64);

Dtype wanted(const Packed& weight) {
    return weight.panels().packing() == cpu::Packing::BF16 ? Dtype::BF16 : Dtype::F32;
}

void check_expert(const char* which, const Packed& weight, const Packed& first, int64_t rows,
                  int64_t cols) {
    const Packed::Cut& cut = weight.cut();
    check(weight.rows() == first.rows() && cut.first_row == first.cut().first_row &&
              cut.of_halves == first.cut().of_halves,
          "moe: a ", which, " has other rows than another one");
    check(weight.name() == first.name(), "moe: a ", which, " is packed as ", weight.name(),
          ", another one as ", first.name());
    check(cut.total_rows == rows && weight.cols() == cols, "moe: a ", which, " is ", cut.total_rows,
          " x ", weight.cols(), "; it must be ", rows, " x ", cols);
}

RoutingOptions checked_routing(const MoeOptions& options) {
    const RoutingOptions& routing = options.routing;
    const int64_t num_experts = options.num_experts;
    check(routing.num_groups >= 1 && num_experts % routing.num_groups == 0 &&
              routing.top_groups >= 1 && routing.top_groups <= routing.num_groups,
          "moe: ", routing.top_groups, " of ", routing.num_groups, " groups of ", num_experts,
          " experts");
    check(options.top_k <= num_experts / routing.num_groups * routing.top_groups, "moe: top_k is ",
          options.top_k, ", more than ", routing.top_groups, " groups have");
    check(routing.best_of_group >= 1, "moe: best_of_group is ", routing.best_of_group);
    check(options.routing_bias.empty() ||
              (routing.is_sigmoid &&
               static_cast<int64_t>(options.routing_bias.size()) == num_experts),
          "moe: a routing bias has ", options.routing_bias.size(),
          " values; it must have one for each of ", num_experts, " experts that sigmoids score");
    return routing;
}

}  // namespace

void Program::moe(const MoeBuffers& at_index, const MoeOptions& options) {
    const Buffer& dst = at("moe", at_index.dst);
    const Buffer& src = at("moe", at_index.src);
    const Buffer& scores = at("moe", at_index.scores);
    const Buffer& gathered = at("moe", at_index.gathered);
    const Buffer& hidden = at("moe", at_index.hidden);
    const Buffer& results = at("moe", at_index.results);
    const auto num_own = static_cast<int64_t>(options.gate_up.size());
    const int64_t num_experts = options.num_experts;
    const int64_t k = options.top_k;
    check(num_own >= 1 && options.down.size() == options.gate_up.size(), "moe: ", num_own,
          " gate_up and ", options.down.size(), " down; there must be as many of both");
    check(num_experts <= kMaxExperts && options.first_slot >= 0 &&
              num_own <= options.num_slots - options.first_slot,
          "moe: ", num_own, " experts from ", options.first_slot, " on, of ", options.num_slots,
          "; there may be ", kMaxExperts, " at most");
    check(options.num_slots >= num_experts, "moe: ", options.num_slots, " slots for ", num_experts,
          " experts");
    check(num_own == options.num_slots || ranks_ != nullptr || peers_ != nullptr, "moe: ", num_own,
          " of ", options.num_slots, " experts, and no other ranks");
    check(k >= 1 && k <= std::min(num_experts, kMaxTopK), "moe: top_k is ", k, " of ", num_experts,
          " experts; at most ", kMaxTopK);
    check(options.activation != cpu::Activation::None, "moe needs an activation");
    const Packed& gate_up = *options.gate_up.front();
    const Packed& down = *options.down.front();
    const int64_t cols = src.matrix.cols;
    const int64_t width = gate_up.cut().total_rows / 2;
    check(gate_up.rows() % (2 * cpu::kPanelRows) == 0, "moe: gate_up has ", gate_up.rows(),
          " rows; each half must be a multiple of ", cpu::kPanelRows);
    check(gate_up.cut().of_halves || !gate_up.is_cut(), "moe: gate_up is no part of both halves");
    for (int64_t e = 0; e < num_own; ++e) {
        const auto index = static_cast<size_t>(e);
        check_expert("gate_up", *options.gate_up[index], gate_up, 2 * width, cols);
        check_expert("down", *options.down[index], down, cols, width);
    }
    const struct {
        const char* name;
        const Buffer& buffer;
        int64_t cols;
        Dtype dtype;
    } wishes[] = {{"dst", dst, cols, Dtype::F32},
                  {"src", src, cols, Dtype::F32},
                  {"scores", scores, num_experts, Dtype::F32},
                  {"gathered", gathered, k * cols, wanted(gate_up)},
                  {"hidden", hidden, k * width, wanted(down)},
                  {"results", results, k * cols, Dtype::F32}};
    for (const auto& wish : wishes) {
        const Matrix& matrix = wish.buffer.matrix;
        check(wish.buffer.rows == Rows::Tokens && matrix.cols == wish.cols &&
                  matrix.dtype == wish.dtype,
              "moe: ", wish.name, " must have rows T of ", wish.cols, " columns of ",
              octavo::name_of(wish.dtype), "; it has ", matrix.cols, " of ",
              octavo::name_of(matrix.dtype));
        for (const auto& other : wishes) {
            if (&other != &wish) {
                check_overlap("moe", wish.buffer, other.buffer, false);
            }
        }
    }
    Moe instruction{};
    instruction.src = src.matrix;
    instruction.gathered = {gathered.matrix.data, cols, gathered.matrix.dtype};
    instruction.hidden = {hidden.matrix.data, width, hidden.matrix.dtype};
    instruction.results = {results.matrix.data, cols, Dtype::F32};
    instruction.activation = options.activation;
    instruction.slots = first_slots(options.num_slots, num_experts);
    instruction.gate_up = experts_of(options, options.gate_up, options.gate_up_bias);
    instruction.down = experts_of(options, options.down, options.down_bias);
    pairs_.make_room(max_tokens_ * k, options.num_slots);
    own_pairs_.resize(static_cast<size_t>(team_.num_threads()));
    for (Pairs& pairs : own_pairs_) {
        pairs.make_room(kOwnRows * k, options.num_slots);
    }
    instruction.number = expert_tokens_.size();
    expert_tokens_.emplace_back(num_experts, 0);
    slot_tokens_.emplace_back(options.num_slots, 0);
    instruction.dst = dst.matrix;
    instruction.routing = {reinterpret_cast<const float*>(scores.matrix.data), num_experts, k,
                           options.renormalise, checked_routing(options)};
    if (!options.routing_bias.empty()) {
        instruction.routing.options.bias = keep(options.routing_bias, options.routing_bias.size());
    }
    for (const Packed* weight : {&gate_up, &down}) {
        const cpu::Kernels& kernels = team_.kernels();
        const cpu::Panels panels = weight->panels();
        scratch_bytes_ = std::max(scratch_bytes_, kernels.linear_scratch_bytes(panels));
        if (panels.is_quantized()) {
            const int64_t row =
                kernels.quantized_row_bytes(of_experts(panels, {}, {}, cpu::Activation::None));
            const int64_t num_ranks = peers_ == nullptr ? 1 : peers_->size();
            quantized_bytes_ = std::max(quantized_bytes_, num_ranks * max_tokens_ * k * row);
        }
    }
    if (peers_ != nullptr) {
        make_exchange(instruction);
    }
    push({Rows::Tokens, std::move(instruction)});
}

// Each rank routes all tokens for itself, and of few tokens each worker: that is less than a
// barrier.
const Pairs& Program::route_tokens(const Moe& moe, int64_t num_tokens, int worker) {
    const bool is_few = joins_phases_ && num_tokens <= kOwnRows;
    Pairs& pairs = is_few ? own_pairs_[static_cast<size_t>(worker)] : pairs_;
    const Range own =
        is_few ? Range{0, num_tokens} : split(num_tokens, worker, team_.num_threads());
    route(moe.routing, pairs, own.begin, own.end);
    if (!is_few) {
        team_.barrier();
    }
    if (is_few || worker == 0) {
        place(moe.routing, moe.slots, pairs, num_tokens);
    }
    if (worker == 0) {
        count(moe, pairs);
    }
    if (!is_few) {
        team_.barrier();
    }
    return pairs;
}

void Program::run_moe(const Moe& moe, int64_t num_tokens, int worker) {
    if (peers_ != nullptr) {
        run_exchange(moe, num_tokens, worker);
        return;
    }
    const int64_t top_k = moe.routing.top_k;
    const Pairs& routed = route_tokens(moe, num_tokens, worker);
    cpu::RowOpArgs gather{.op = cpu::RowOp::Select, .dst = moe.gathered, .src = moe.src};
    gather.rows = routed.tokens.data();
    gather.factors = moe.routing.options.weighs_inputs ? routed.factors.data() : nullptr;
    const Share all = this->all(worker);
    const Range pairs = split(num_tokens * top_k, all.worker, all.workers);
    team_.kernels().row_op(gather, pairs.begin, pairs.end);
    const bool is_many = num_tokens * top_k > kOwnRows;
    const bool shares_gathered = is_many && moe.gate_up.weights[0].is_quantized();
    const bool shares_hidden = (!joins_phases_ || num_tokens * top_k > kOwnPairs) && is_many &&
                               moe.down.weights[0].is_quantized();
    if (shares_gathered) {  // each worker those that it has just gathered
        quantize_pairs(of_experts(moe.gate_up.weights[0], moe.gathered, {}, moe.activation), pairs);
    }
    meet();
    for_each_expert(moe.gate_up, routed, moe.gathered, moe.hidden, moe.activation, shares_gathered,
                    worker);
    meet();
    if (shares_hidden) {
        quantize_pairs(of_experts(moe.down.weights[0], moe.hidden, {}, cpu::Activation::None),
                       pairs);
        meet();
    }
    for_each_expert(moe.down, routed, moe.hidden, moe.results, cpu::Activation::None, shares_hidden,
                    worker);
    meet();

    const Range tokens = split(num_tokens, all.worker, all.workers);
    combine(moe.dst, reinterpret_cast<const float*>(moe.results.data), routed, top_k, tokens.begin,
            tokens.end);
}

// Memory for what peers show each other, the same for all of them, and for this rank's part of it.
void Program::make_exchange(const Moe& moe) {
    Exchange& exchange = exchange_;
    const int64_t top_k = moe.routing.top_k;
    const int64_t cols = moe.src.cols;
    const int64_t num_tokens = peers_->size() * max_tokens_;
    const int64_t num_pairs = num_tokens * top_k;
    check(num_pairs * cols < int64_t{1} << 40, "moe: no room for ", num_pairs, " rows");
    if (exchange.top_k == 0) {
        const int64_t sizes[] = {kMaxRanks, num_pairs, num_pairs, num_tokens * cols,
                                 num_pairs * cols};
        int64_t offsets[6] = {};  // each at a cache line of its own
        for (size_t part = 0; part < 5; ++part) {
            offsets[part + 1] = offsets[part] + (4 * sizes[part] + 63) / 64 * 64;
        }
        exchange.shared = peers_->share(offsets[5]);
        std::byte* data = exchange.shared.data();
        exchange.counts = reinterpret_cast<int32_t*>(data);
        exchange.experts = reinterpret_cast<int32_t*>(data + offsets[1]);
        exchange.weights = reinterpret_cast<float*>(data + offsets[2]);
        exchange.rows = reinterpret_cast<float*>(data + offsets[3]);
        exchange.results = reinterpret_cast<float*>(data + offsets[4]);
        exchange.top_k = top_k;
        exchange.cols = cols;
        exchange.of.resize(static_cast<size_t>(num_tokens));
    }
    check(exchange.top_k == top_k && exchange.cols == cols, "moe: ", top_k, " experts of ", cols,
          " columns; peers exchange ", exchange.top_k, " of ", exchange.cols);
    exchange.pairs.make_room(num_pairs, moe.slots.size());
    const auto reserve = [&](Memory& memory, const Matrix& matrix) {
        const int64_t num_bytes = num_pairs * (matrix.row(1) - matrix.row(0));
        if (memory.size() < num_bytes) {
            memory = Memory(num_bytes);
        }
    };
    reserve(exchange.gathered, moe.gathered);
    reserve(exchange.hidden, moe.hidden);
}

// The own tokens and the experts that they chose, for the peers to see.
void Program::show_tokens(const Moe& moe, Range tokens) {
    const Exchange& exchange = exchange_;
    const int64_t top_k = exchange.top_k;
    const int64_t first = peers_->rank() * max_tokens_ + tokens.begin;
    const int64_t count = tokens.end - tokens.begin;
    std::copy_n(pairs_.experts.data() + tokens.begin * top_k, count * top_k,
                exchange.experts + first * top_k);
    std::copy_n(pairs_.weights.data() + tokens.begin * top_k, count * top_k,
                exchange.weights + first * top_k);
    std::copy_n(reinterpret_cast<const float*>(moe.src.row(tokens.begin)), count * exchange.cols,
                exchange.rows + first * exchange.cols);
}

// The tokens of all ranks by expert. NOTE: what ranks show is copied first: once one has failed it
// may change meanwhile, and what indexes memory must not.
void Program::place_all(const Moe& moe) {
    Exchange& exchange = exchange_;
    const int64_t top_k = exchange.top_k;
    int64_t num_tokens = 0;
    for (int rank = 0; rank < peers_->size(); ++rank) {
        const int64_t count = exchange.counts[rank];
        const int64_t first = rank * max_tokens_;
        std::copy_n(exchange.experts + first * top_k, count * top_k,
                    exchange.pairs.experts.data() + num_tokens * top_k);
        std::copy_n(exchange.weights + first * top_k, count * top_k,
                    exchange.pairs.weights.data() + num_tokens * top_k);
        for (int64_t token = 0; token < count; ++token) {
            exchange.of[static_cast<size_t>(num_tokens + token)] =
                static_cast<int32_t>(first + token);
        }
        exchange.first_token = rank == peers_->rank() ? num_tokens : exchange.first_token;
        num_tokens += count;
    }
    place(moe.routing, moe.slots, exchange.pairs, num_tokens);
    for (int64_t pair = 0; pair < num_tokens * top_k; ++pair) {
        int32_t& token = exchange.pairs.tokens[static_cast<size_t>(pair)];
        token = exchange.of[static_cast<size_t>(token)];
    }
    count(moe, exchange.pairs);
}

void Program::count(const Moe& moe, const Pairs& pairs) {
    std::vector<int64_t>& by_slot = slot_tokens_[moe.number];
    for (size_t slot = 0; slot < by_slot.size(); ++slot) {
        const int64_t rows = pairs.starts[slot + 1] - pairs.starts[slot];
        by_slot[slot] += rows;
        expert_tokens_[moe.number][static_cast<size_t>(moe.slots.expert_in(slot))] += rows;
    }
}

void Program::run_exchange(const Moe& moe, int64_t num_tokens, int worker) {
    Exchange& exchange = exchange_;
    const Pairs& pairs = exchange.pairs;
    const Range own = split(num_tokens, worker, team_.num_threads());
    route(moe.routing, pairs_, own.begin, own.end);
    show_tokens(moe, own);
    if (worker == 0) {
        exchange.counts[peers_->rank()] = static_cast<int32_t>(num_tokens);
    }
    peers_->barrier();
    if (worker == 0) {
        place_all(moe);
    }
    team_.barrier();

    const int64_t first_slot = moe.gate_up.first_slot;
    const int64_t num_own = static_cast<int64_t>(moe.gate_up.weights.size());
    const int64_t begin = pairs.starts[static_cast<size_t>(first_slot)];
    const int64_t count = pairs.starts[static_cast<size_t>(first_slot + num_own)] - begin;
    Range rows = split(count, worker, team_.num_threads());
    rows = {begin + rows.begin, begin + rows.end};
    const Matrix gathered{exchange.gathered.data(), moe.gathered.cols, moe.gathered.dtype};
    const Matrix hidden{exchange.hidden.data(), moe.hidden.cols, moe.hidden.dtype};
    const Matrix results{reinterpret_cast<std::byte*>(exchange.results), exchange.cols, Dtype::F32};
    cpu::RowOpArgs gather{
        .op = cpu::RowOp::Select,
        .dst = gathered,
        .src = {reinterpret_cast<std::byte*>(exchange.rows), exchange.cols, Dtype::F32}};
    gather.rows = pairs.tokens.data();
    gather.factors = moe.routing.options.weighs_inputs ? pairs.factors.data() : nullptr;
    team_.kernels().row_op(gather, rows.begin, rows.end);
    const bool is_many = count > kOwnRows;
    const bool shares_gathered = is_many && moe.gate_up.weights[0].is_quantized();
    const bool shares_hidden = is_many && moe.down.weights[0].is_quantized();
    if (shares_gathered) {  // each worker those that it has just gathered
        quantize_pairs(of_experts(moe.gate_up.weights[0], gathered, {}, moe.activation), rows);
    }
    team_.barrier();
    for_each_expert(moe.gate_up, pairs, gathered, hidden, moe.activation, shares_gathered, worker);
    team_.barrier();
    if (shares_hidden) {
        quantize_pairs(of_experts(moe.down.weights[0], hidden, {}, cpu::Activation::None), rows);
        team_.barrier();
    }
    for_each_expert(moe.down, pairs, hidden, results, cpu::Activation::None, shares_hidden, worker);
    peers_->barrier();
    combine(moe.dst, exchange.results, pairs, exchange.top_k, own.begin, own.end,
            exchange.first_token);
}

void Program::run_empty() {
    check(peers_ != nullptr, "run_empty: there are no peers");
    make_room();
    team_.run([&](int worker) {
        for (const Instruction& instruction : instructions_) {
            if (const auto* moe = std::get_if<Moe>(&instruction.args)) {
                run_exchange(*moe, 0, worker);
                team_.barrier();
            }
        }
    });
    check_ranks();
}

// A product of rows by expert; with an activation, of gate and up.
cpu::LinearArgs Program::of_experts(const cpu::Panels& weight, const Matrix& src, const Matrix& dst,
                                    cpu::Activation activation) const {
    cpu::LinearArgs args{};
    args.dst = dst;
    args.src = src;
    args.weight = weight;
    args.activation = activation;
    args.activation_bits = activation_bits_;
    if (activation != cpu::Activation::None) {
        args.mode = cpu::LinearMode::Glu;
    }
    return args;
}

void Program::quantize_pairs(const cpu::LinearArgs& args, Range rows) {
    team_.kernels().quantize_rows(args, rows.begin, rows.end, quantized_.data());
}

Program::Experts Program::experts_of(const MoeOptions& options, const std::vector<Packed*>& weights,
                                     std::span<const float> biases) {
    const bool are_some = static_cast<int64_t>(weights.size()) < options.num_slots;
    Experts experts{.weights = {},
                    .first_slot = options.first_slot,
                    .first_column = weights.front()->cut().first_row,
                    .is_own = are_some || weights.front()->is_cut(),
                    .biases = {},
                    .bytes = {}};
    const auto rows = static_cast<size_t>(weights.front()->rows());
    check(biases.empty() || biases.size() == weights.size() * rows, "moe: biases have ",
          biases.size(), " values for ", weights.size(), " experts of ", rows, " rows");
    const auto padded = static_cast<size_t>(weights.front()->panels().count() * cpu::kPanelRows);
    for (size_t e = 0; e < weights.size() && !biases.empty(); ++e) {
        experts.biases.emplace_back(keep(biases.subspan(e * rows, rows), padded), padded);
    }
    for (Packed* weight : weights) {
        experts.weights.push_back(weight->panels());
        experts.bytes.push_back(weight->bytes());
    }
    return experts;
}

void Program::move_experts(const std::vector<std::vector<int32_t>>& layouts) {
    Ranks* group = ranks_ == nullptr ? peers_ : ranks_;
    check(group != nullptr, "move_experts: there are no other ranks");
    check(layouts.size() == expert_tokens_.size(), "move_experts: slots of ", layouts.size(),
          " mixtures; there are ", expert_tokens_.size());
    std::vector<ExpertSlots> slots;
    for (size_t number = 0; number < layouts.size(); ++number) {
        check(layouts[number].size() == slot_tokens_[number].size(),
              "move_experts: ", layouts[number].size(), " slots; there are ",
              slot_tokens_[number].size());
        slots.emplace_back(layouts[number], static_cast<int64_t>(expert_tokens_[number].size()));
    }
    if (moved_.size() == 0) {
        moved_ = group->share(kMovedBytes);
    }
    for (Instruction& instruction : instructions_) {
        if (auto* moe = std::get_if<Moe>(&instruction.args)) {
            move_experts(*moe, slots[moe->number], *group);
        }
    }
    check_ranks();
}

// A piece of each expert that moves is laid down where all see it, before any slot is written; then
// the next piece. So slots may be exchanged in whatever way, with room for some pieces only.
void Program::move_experts(Moe& moe, const ExpertSlots& to, Ranks& group) {
    struct Move {
        int64_t from, to;  // among the own slots, if they are there
    };
    std::vector<Move> moves;
    const int64_t first = moe.gate_up.first_slot;
    for (int64_t slot = 0; slot < to.size(); ++slot) {
        const int32_t expert = to.expert_in(static_cast<size_t>(slot));
        if (moe.slots.expert_in(static_cast<size_t>(slot)) != expert) {
            moves.push_back({moe.slots.slot_of(expert, slot) - first, slot - first});
        }
    }
    if (moves.empty()) {
        return;
    }
    const auto num_own = static_cast<int64_t>(moe.gate_up.weights.size());
    const size_t piece = static_cast<size_t>(kMovedBytes) / moves.size() / 64 * 64;
    const auto move = [&](std::span<const std::span<std::byte>> slots, int worker) {
        const auto copies = [&](bool is_out, size_t offset) {
            const size_t count = std::min(piece, slots[0].size() - offset);
            for (auto i = static_cast<size_t>(worker); i < moves.size();
                 i += static_cast<size_t>(team_.num_threads())) {
                const int64_t slot = is_out ? moves[i].from : moves[i].to;
                if (slot < 0 || slot >= num_own) {
                    continue;
                }
                std::byte* own = slots[static_cast<size_t>(slot)].data() + offset;
                std::byte* shown = moved_.data() + i * piece;
                std::memcpy(is_out ? shown : own, is_out ? own : shown, count);
            }
            return group.barrier();
        };
        for (size_t offset = 0; offset < slots[0].size(); offset += piece) {
            if (!copies(true, offset) || !copies(false, offset)) {
                return;
            }
        }
    };
    team_.run([&](int worker) {
        for (const Experts* experts : {&moe.gate_up, &moe.down}) {
            move(experts->bytes, worker);
            if (!experts->biases.empty()) {
                std::vector<std::span<std::byte>> biases;
                for (const std::span<float> bias : experts->biases) {
                    biases.push_back(std::as_writable_bytes(bias));
                }
                move(biases, worker);
            }
        }
    });
    moe.slots = to;
}

// One product for each own slot whose expert has rows. `shares_rows`: they have been quantised.
void Program::for_each_expert(const Experts& experts, const Pairs& pairs, const Matrix& src,
                              const Matrix& dst, cpu::Activation activation, bool shares_rows,
                              int worker) {
    const Share share = experts.is_own ? own(worker) : all(worker);
    const int32_t* starts = pairs.starts.data() + experts.first_slot;
    for (size_t e = 0; e < experts.weights.size(); ++e) {
        const int64_t first = starts[e];
        const int64_t count = starts[e + 1] - first;
        if (count == 0) {
            continue;
        }
        cpu::LinearArgs args = of_experts(experts.weights[e], {src.row(first), src.cols, src.dtype},
                                          {dst.row(first), dst.cols, dst.dtype}, activation);
        args.num_rows = count;
        args.first_column = experts.first_column;
        args.bias = experts.biases.empty() ? nullptr : experts.biases[e].data();
        if (shares_rows) {
            args.quantized = quantized_.data() + first * team_.kernels().quantized_row_bytes(args);
        }
        const Range units = split(args.units(), share.worker, share.workers);
        team_.kernels().linear(args, units.begin, units.end, scratch(worker));
    }
}

}  // namespace octavo
