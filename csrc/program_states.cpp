// Instructions of layers with a recurrent state, checked when they are added and before each step.
#include <vector>

#include "common/check.h"
#include "program.h"

namespace octavo {

namespace {

void check_size(const char* name, const char* which, std::span<const float> values,
                int64_t expected) {
    check(static_cast<int64_t>(values.size()) == expected, name, ": ", which, " has ",
          values.size(), " values; it must have ", expected);
}

void check_cols(const char* name, const char* which, const Buffer& buffer, int64_t expected) {
    check(buffer.matrix.cols == expected, name, ": ", which, " has ", buffer.matrix.cols,
          " columns; it must have ", expected);
}

}  // namespace

const Buffer& Program::f32_of_tokens(const char* name, const char* which, int index) const {
    const Buffer& buffer = at(name, index);
    check(buffer.matrix.dtype == Dtype::F32 && buffer.rows == Rows::Tokens, name, ": ", which,
          " must be f32 with rows T");
    return buffer;
}

void Program::columns(int dst, int src, int64_t first) {
    const Buffer& to = at("columns", dst);
    const Buffer& from = at("columns", src);
    check(to.rows == from.rows, "columns: rows of dst and src differ");
    check(first >= 0 && first <= from.matrix.cols - to.matrix.cols, "columns: ", to.matrix.cols,
          " columns from ", first, " on, of ", from.matrix.cols);
    check_overlap("columns", to, from, false);
    cpu::RowOpArgs args{.op = cpu::RowOp::Columns, .dst = to.matrix, .src = from.matrix};
    args.first = first;
    instructions_.push_back({to.rows, args});
}

void Program::join(int dst, int x, int y) {
    const Buffer& to = at("join", dst);
    const Buffer& left = at("join", x);
    const Buffer& right = at("join", y);
    check(to.rows == left.rows && to.rows == right.rows, "join: rows of dst, x and y differ");
    check_cols("join", "dst", to, left.matrix.cols + right.matrix.cols);
    check_overlap("join", to, left, false);
    check_overlap("join", to, right, false);
    const auto part = [&](const cpu::Matrix& src, int64_t first) {
        return cpu::RowOpArgs{
            .op = cpu::RowOp::Convert, .dst = to.matrix.columns(first, src.cols), .src = src};
    };
    instructions_.push_back(
        {to.rows, Join{part(left.matrix, 0), part(right.matrix, left.matrix.cols)}});
}

void Program::multiply(int dst, int x, int y, cpu::Activation activation) {
    const Buffer& to = at("multiply", dst);
    const Buffer& other = at("multiply", y);
    check(other.matrix.dtype == Dtype::F32 && other.rows == to.rows,
          "multiply: y must be f32, with rows as dst");
    check_cols("multiply", "y", other, to.matrix.cols);
    check_overlap("multiply", to, other, true);
    row_op("multiply", dst, x,
           {.op = cpu::RowOp::Multiply, .other = other.matrix, .activation = activation});
}

void Program::group_norm(int dst, int src, std::span<const float> weight, float eps, int64_t size) {
    const Buffer& to = f32_of_tokens("group_norm", "dst", dst);
    const Buffer& from = f32_of_tokens("group_norm", "src", src);
    const int64_t cols = from.matrix.cols;
    check_cols("group_norm", "dst", to, cols);
    check_overlap("group_norm", to, from, true);
    check(size >= 1 && cols % size == 0, "group_norm: groups of ", size, " of ", cols, " columns");
    const auto given = static_cast<int64_t>(weight.size());
    check(given == size || given == cols, "group_norm: weight has ", given,
          " values for groups of ", size, " of ", cols, " columns");
    instructions_.push_back(
        {to.rows, cpu::GroupNormArgs{to.matrix, from.matrix, keep(weight, weight.size()), size, eps,
                                     given == size}});
}

void Program::short_conv(int dst, int src, const ConvOptions& options) {
    const Buffer& to = f32_of_tokens("short_conv", "dst", dst);
    const Buffer& from = f32_of_tokens("short_conv", "src", src);
    const int64_t cols = from.matrix.cols;
    check(ranks_ == nullptr, "short_conv: states cannot be cut over ranks");
    check_cols("short_conv", "dst", to, cols);
    check_overlap("short_conv", to, from, false);
    check(options.kernel >= 1 && options.kernel <= cpu::kMaxConvKernel, "short_conv: kernel is ",
          options.kernel, "; it must be between 1 and ", cpu::kMaxConvKernel);
    check_size("short_conv", "weight", options.weight, options.kernel * cols);
    cpu::ConvArgs args{.dst = to.matrix, .src = from.matrix};
    args.weight = keep(options.weight, options.weight.size());
    if (!options.bias.empty()) {
        check_size("short_conv", "bias", options.bias, cols);
        args.bias = keep(options.bias, options.bias.size());
    }
    args.kernel = options.kernel;
    args.activation = options.activation;
    const int64_t values = (options.kernel - 1) * cols;
    instructions_.push_back({to.rows, Recurrent<cpu::ConvArgs>{args, options.layer, values}});
}

void Program::ssd_scan(int dst, int xbc, int dt, const SsdOptions& options) {
    const Buffer& to = f32_of_tokens("ssd_scan", "dst", dst);
    const Buffer& from = f32_of_tokens("ssd_scan", "xbc", xbc);
    const Buffer& steps = f32_of_tokens("ssd_scan", "dt", dt);
    const int64_t heads = options.heads;
    check(ranks_ == nullptr, "ssd_scan: states cannot be cut over ranks");
    check(heads >= 1 && options.head_dim >= 1 && options.state_size >= 1 && options.groups >= 1 &&
              heads % options.groups == 0,
          "ssd_scan: ", heads, " heads of ", options.head_dim, " columns in ", options.groups,
          " groups of ", options.state_size);
    check_cols("ssd_scan", "dst", to, heads * options.head_dim);
    check_cols("ssd_scan", "xbc", from,
               heads * options.head_dim + 2 * options.groups * options.state_size);
    check_cols("ssd_scan", "dt", steps, heads);
    check_overlap("ssd_scan", to, from, false);
    check_overlap("ssd_scan", to, steps, false);
    check_size("ssd_scan", "a", options.a, heads);
    check_size("ssd_scan", "d", options.d, heads);
    check_size("ssd_scan", "dt_bias", options.dt_bias, heads);
    check(options.offset >= 0, "ssd_scan: offset ", options.offset);
    cpu::SsdArgs args{.dst = to.matrix, .xbc = from.matrix, .dt = steps.matrix};
    args.heads = heads;
    args.head_dim = options.head_dim;
    args.groups = options.groups;
    args.state_size = options.state_size;
    args.a = keep(options.a, options.a.size());
    args.d = keep(options.d, options.d.size());
    args.dt_bias = keep(options.dt_bias, options.dt_bias.size());
    args.dt_min = options.dt_min;
    args.dt_max = options.dt_max;
    args.state_offset = options.offset;
    const int64_t values = options.offset + heads * options.state_size * options.head_dim;
    instructions_.push_back({to.rows, Recurrent<cpu::SsdArgs>{args, options.layer, values}});
}

void Program::delta_rule(int dst, int qkv, int gates, const DeltaOptions& options) {
    const Buffer& to = f32_of_tokens("delta_rule", "dst", dst);
    const Buffer& from = f32_of_tokens("delta_rule", "qkv", qkv);
    const Buffer& gate = f32_of_tokens("delta_rule", "gates", gates);
    const int64_t heads = options.value_heads;
    check(ranks_ == nullptr, "delta_rule: states cannot be cut over ranks");
    check(options.key_heads >= 1 && heads >= 1 && heads % options.key_heads == 0 &&
              options.value_dim >= 1 && options.key_dim >= 1 && options.key_dim <= cpu::kMaxKeyDim,
          "delta_rule: ", heads, " value heads of ", options.value_dim, " columns, ",
          options.key_heads, " key heads of ", options.key_dim, ", of which there may be ",
          cpu::kMaxKeyDim);
    check_cols("delta_rule", "dst", to, heads * options.value_dim);
    check_cols("delta_rule", "qkv", from,
               2 * options.key_heads * options.key_dim + heads * options.value_dim);
    check_cols("delta_rule", "gates", gate, 2 * heads);
    check_overlap("delta_rule", to, from, false);
    check_overlap("delta_rule", to, gate, false);
    check_size("delta_rule", "a", options.a, heads);
    check_size("delta_rule", "dt_bias", options.dt_bias, heads);
    check(options.offset >= 0, "delta_rule: offset ", options.offset);
    cpu::DeltaArgs args{.dst = to.matrix, .qkv = from.matrix, .gates = gate.matrix};
    args.key_heads = options.key_heads;
    args.value_heads = heads;
    args.key_dim = options.key_dim;
    args.value_dim = options.value_dim;
    args.a = keep(options.a, options.a.size());
    args.dt_bias = keep(options.dt_bias, options.dt_bias.size());
    args.state_offset = options.offset;
    const int64_t values = options.offset + heads * options.key_dim * options.value_dim;
    instructions_.push_back({to.rows, Recurrent<cpu::DeltaArgs>{args, options.layer, values}});
}

void Program::selective_scan(const SelectiveBuffers& buffers, const SelectiveOptions& options) {
    const Buffer& to = f32_of_tokens("selective_scan", "dst", buffers.dst);
    const Buffer& x = f32_of_tokens("selective_scan", "x", buffers.x);
    const Buffer& dt = f32_of_tokens("selective_scan", "dt", buffers.dt);
    const Buffer& b = f32_of_tokens("selective_scan", "b", buffers.b);
    const Buffer& c = f32_of_tokens("selective_scan", "c", buffers.c);
    const int64_t cols = to.matrix.cols;
    check(ranks_ == nullptr, "selective_scan: states cannot be cut over ranks");
    check(options.state_size >= 1, "selective_scan: state_size ", options.state_size);
    check_cols("selective_scan", "x", x, cols);
    check_cols("selective_scan", "dt", dt, cols);
    check_cols("selective_scan", "b", b, options.state_size);
    check_cols("selective_scan", "c", c, options.state_size);
    for (const Buffer* from : {&x, &dt, &b, &c}) {
        check_overlap("selective_scan", to, *from, false);
    }
    check_size("selective_scan", "a", options.a, options.state_size * cols);
    check_size("selective_scan", "d", options.d, cols);
    check_size("selective_scan", "dt_bias", options.dt_bias, cols);
    check(options.offset >= 0, "selective_scan: offset ", options.offset);
    cpu::SelectiveArgs args{.dst = to.matrix, .x = x.matrix, .dt = dt.matrix};
    args.b = b.matrix;
    args.c = c.matrix;
    args.state_size = options.state_size;
    args.a = keep(options.a, options.a.size());
    args.d = keep(options.d, options.d.size());
    args.dt_bias = keep(options.dt_bias, options.dt_bias.size());
    args.state_offset = options.offset;
    const int64_t values = options.offset + options.state_size * cols;
    instructions_.push_back({to.rows, Recurrent<cpu::SelectiveArgs>{args, options.layer, values}});
}

// Slots index memory, and no two of a step may be the same: each is written.
void Program::check_states(const Step& step) const {
    bool has_states = false;
    const auto check_op = [&](const auto& op) {
        check(step.states != nullptr, "run: the program has recurrent states, the step none");
        check(op.layer >= 0 && op.layer < step.states->num_layers(), "run: state of layer ",
              op.layer, " of ", step.states->num_layers());
        check(op.values <= step.states->values(op.layer), "run: a state of ", op.values,
              " values in layer ", op.layer, ", which has ", step.states->values(op.layer));
        has_states = true;
    };
    for (const Instruction& instruction : instructions_) {
        if (const auto* conv = std::get_if<Recurrent<cpu::ConvArgs>>(&instruction.args)) {
            check_op(*conv);
        } else if (const auto* ssd = std::get_if<Recurrent<cpu::SsdArgs>>(&instruction.args)) {
            check_op(*ssd);
        } else if (const auto* rule = std::get_if<Recurrent<cpu::DeltaArgs>>(&instruction.args)) {
            check_op(*rule);
        } else if (const auto* own =
                       std::get_if<Recurrent<cpu::SelectiveArgs>>(&instruction.args)) {
            check_op(*own);
        }
    }
    if (!has_states) {
        return;
    }
    check(static_cast<int64_t>(step.state_slots.size()) == step.num_seqs(),
          "step: state_slots has ", step.state_slots.size(), " entries; it must have ",
          step.num_seqs());
    check(step.state_saves.empty() ||
              static_cast<int64_t>(step.state_saves.size()) == step.num_tokens(),
          "step: state_saves has ", step.state_saves.size(), " entries; it must have ",
          step.num_tokens());
    std::vector<bool> taken(static_cast<size_t>(step.states->num_slots()), false);
    const auto take = [&](const char* name, int32_t slot) {
        step.states->check_slot(name, slot);
        check(!taken[static_cast<size_t>(slot)], "step: ", name, " has slot ", slot,
              ", which the step writes twice");
        taken[static_cast<size_t>(slot)] = true;
    };
    for (const int32_t slot : step.state_slots) {
        take("state_slots", slot);
    }
    for (const int32_t slot : step.state_saves) {
        if (slot != -1) {
            take("state_saves", slot);
        }
    }
}

}  // namespace octavo
