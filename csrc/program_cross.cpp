// Instructions of models with an encoder: what reads features, and attention over a fixed memory.
#include <algorithm>
#include <numeric>

#include "common/check.h"
#include "program.h"

namespace octavo {

using cpu::kBlockTokens;
using cpu::kPanelRows;

namespace {

int64_t blocks_of(int64_t length) { return (length + kBlockTokens - 1) / kBlockTokens; }

}  // namespace

void Program::check_cross(const char* name, const CrossOptions& options) {
    check(ranks_ == nullptr, name, ": not over several ranks");
    check(options.layer >= 0, name, ": layer ", options.layer);
    check(options.num_heads >= 1 && options.num_heads <= 65536, name, ": ", options.num_heads,
          " heads");
    check(options.head_dim >= kPanelRows && options.head_dim % kPanelRows == 0 &&
              options.head_dim <= cpu::kMaxHeadDim,
          name, ": head_dim is ", options.head_dim, "; it must be a multiple of ", kPanelRows,
          " up to ", cpu::kMaxHeadDim);
    check(options.length >= 1 && options.length <= (1 << 20), name, ": length ", options.length);
    check(cross_length_ == 0 || cross_length_ == options.length, name, ": length ", options.length,
          ", but another instruction has ", cross_length_);
    cross_length_ = options.length;
}

void Program::cross_attention(int dst, int q, const CrossOptions& options) {
    const char* name = "cross_attention";
    const Buffer& to = at(name, dst);
    const Buffer& from = at(name, q);
    check_cross(name, options);
    const int64_t cols = options.num_heads * options.head_dim;
    check(from.matrix.dtype == Dtype::F32, name, ": q must be f32");
    check(from.matrix.cols == cols && to.matrix.cols == cols, name, ": q has ", from.matrix.cols,
          " and dst ", to.matrix.cols, " columns; both must have ", cols);
    check(to.rows == Rows::Tokens && from.rows == Rows::Tokens, name, ": rows must be T");
    check_overlap(name, to, from, false);
    Attention instruction{};
    instruction.layer = options.layer;
    instruction.plan = plan_for({.num_heads = options.num_heads,
                                 .num_kv_heads = options.num_heads,
                                 .head_dim = options.head_dim,
                                 .window = 0,
                                 .is_causal = false,
                                 .cross_length = options.length});
    cpu::AttentionArgs& args = instruction.args;
    args.dst = to.matrix;
    args.qkv = from.matrix;
    args.kv.num_kv_heads = options.num_heads;
    args.kv.head_dim = options.head_dim;
    args.num_heads = options.num_heads;
    args.heads = {options.num_heads, options.num_heads, 0, 0};
    args.scale = options.scale;
    args.is_causal = false;
    args.has_queries_only = true;
    const int64_t query_bytes = max_tokens_ * cols * 4;
    if (queries_.size() < query_bytes) {
        queries_ = Memory(query_bytes);
    }
    scratch_bytes_ = std::max(
        scratch_bytes_, team_.kernels().attend_scratch_bytes(args.group(), options.head_dim, 0));
    push({to.rows, instruction});
}

void Program::store_cross(int src, const CrossOptions& options) {
    const char* name = "store_cross";
    const Buffer& from = at(name, src);
    check_cross(name, options);
    const int64_t cols = 2 * options.num_heads * options.head_dim;
    check(from.matrix.dtype == Dtype::F32, name, ": src must be f32");
    check(from.matrix.cols == cols, name, ": src has ", from.matrix.cols, " columns; it must have ",
          cols);
    check(from.rows == Rows::Tokens, name, ": rows must be T");
    StoreCross store{};
    store.layer = options.layer;
    store.args.qkv = from.matrix;
    store.args.kv.num_kv_heads = options.num_heads;
    store.args.kv.head_dim = options.head_dim;
    store.args.heads = {0, options.num_heads, 0, 0};
    push({from.rows, store});
}

void Program::features(int dst) {
    const Buffer& to = at("features", dst);
    check(to.rows == Rows::Tokens, "features: rows must be T");
    check(feature_cols_ == 0 || feature_cols_ == to.matrix.cols, "features: dst has ",
          to.matrix.cols, " columns, but another one ", feature_cols_);
    feature_cols_ = to.matrix.cols;
    cpu::Matrix src = to.matrix;
    src.dtype = Dtype::F32;
    push({to.rows, Features{{.op = cpu::RowOp::Convert, .dst = to.matrix, .src = src}}});
}

void Program::shift_rows(int dst, int src) {
    const Buffer& to = at("shift_rows", dst);
    const Buffer& from = at("shift_rows", src);
    check(to.rows == Rows::Tokens && from.rows == Rows::Tokens, "shift_rows: rows must be T");
    check(to.matrix.cols == from.matrix.cols, "shift_rows: dst has ", to.matrix.cols,
          " columns, src ", from.matrix.cols);
    check_overlap("shift_rows", to, from, false);
    has_shifts_ = true;
    push({to.rows, Shift{{.op = cpu::RowOp::Select, .dst = to.matrix, .src = from.matrix}}});
}

void Program::check_cross_layer(const cpu::AttentionArgs& args, int64_t layer) const {
    check(layer < cross_->num_layers(), "run: cross-attention of layer ", layer,
          ", but the cross cache has ", cross_->num_layers());
    const cpu::KVLayer& have = cross_->layer(layer);
    check(args.kv.num_kv_heads == have.num_kv_heads && args.kv.head_dim == have.head_dim,
          "run: cross-attention of ", args.kv.num_kv_heads, " heads of ", args.kv.head_dim,
          " columns, but the cross cache has ", have.num_kv_heads, " of ", have.head_dim);
}

// Of the step: what instructions read of it beside tokens. Fills in what depends on the cache.
void Program::place_cross(Step& step, const KVCache* cross) {
    const int64_t count = num_instructions();
    step.end_instruction = step.end_instruction < 0 ? count : step.end_instruction;
    check(step.first_instruction >= 0 && step.first_instruction <= step.end_instruction &&
              step.end_instruction <= count,
          "run: instructions ", step.first_instruction, " to ", step.end_instruction, " of ",
          count);
    const auto wanted = static_cast<size_t>(feature_cols_ * step.num_tokens());
    check(step.features.size() == wanted, "step: features has ", step.features.size(),
          " values; it must have ", wanted);
    if (has_shifts_) {
        shifted_rows_.resize(step.positions.size());
        for (size_t i = 0; i < shifted_rows_.size(); ++i) {
            shifted_rows_[i] = step.positions[i] == 0 ? -1 : static_cast<int32_t>(i) - 1;
        }
        check(limits_.is_whole, "run: shift_rows is of programs that take whole sequences");
    }
    cross_ = cross;
    if (cross_length_ == 0) {
        return;
    }
    check(cross != nullptr, "run: cross-attention needs a cross cache");
    const auto seqs = static_cast<size_t>(step.num_seqs());
    check(step.cross_slots.size() == seqs, "step: cross_slots has ", step.cross_slots.size(),
          " entries; it must have ", seqs);
    step.cross_blocks = blocks_of(cross_length_);
    const int64_t num_slots = cross->num_blocks() / step.cross_blocks;
    for (size_t i = 0; i < seqs; ++i) {
        check(step.cross_slots[i] >= 0 && step.cross_slots[i] < num_slots, "step: cross_slots[", i,
              "] is ", step.cross_slots[i], "; the cross cache has ", num_slots, " slots");
    }
    const auto num_blocks = static_cast<size_t>(cross->num_blocks());
    if (cross_tables_.size() != num_blocks) {
        cross_tables_.resize(num_blocks);
        std::iota(cross_tables_.begin(), cross_tables_.end(), 0);
    }
    step.cross_tables = cross_tables_;
    cross_stores_.clear();
    for (const Instruction& instruction : instructions_) {
        const auto* store = std::get_if<StoreCross>(&instruction.args);
        if (store == nullptr) {
            continue;
        }
        check_cross_layer(store->args, store->layer);
        if (!cross_stores_.empty()) {
            continue;
        }
        for (size_t seq = 0; seq < seqs; ++seq) {
            const int64_t first = step.cross_slots[seq] * step.cross_blocks * kBlockTokens;
            for (int32_t t = step.seq_starts[seq]; t < step.seq_starts[seq + 1]; ++t) {
                const int32_t position = step.positions[static_cast<size_t>(t)];
                check(position < cross_length_, "step: positions[", t, "] is ", position,
                      "; the cross cache holds ", cross_length_);
                cross_stores_.push_back(static_cast<int32_t>(first + position));
            }
        }
    }
}

void Program::run_instruction(const StoreCross& store, const Step& step, int worker) {
    cpu::AttentionArgs args = store.args;
    args.kv = cross_->layer(store.layer);
    args.positions = step.positions.data();
    args.slots = cross_stores_.data();
    const Range units = split(step.num_tokens() * args.head_units(), worker, team_.num_threads());
    team_.kernels().prepare_heads(args, units.begin, units.end);
}

void Program::run_instruction(const Features& features, const Step& step, Range rows) {
    cpu::RowOpArgs args = features.args;
    // Read only.
    args.src.data = reinterpret_cast<std::byte*>(const_cast<float*>(step.features.data()));
    team_.kernels().row_op(args, rows.begin, rows.end);
}

}  // namespace octavo
