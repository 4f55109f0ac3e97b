// Instructions of layers with a recurrent state, checked when they are added and before each step.
#include <initializer_list>
#include <variant>
#include <vector>

#include "common/check.h"
#include "common/overloaded.h"
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
    push({to.rows, args});
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
    push({to.rows, Join{part(left.matrix, 0), part(right.matrix, left.matrix.cols)}});
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
    push({to.rows, cpu::GroupNormArgs{to.matrix, from.matrix, keep(weight, weight.size()), size,
                                      eps, given == size}});
}

// Rows of tokens that the first of `rows` is computed from, and constants, which are copied.
void Program::bind_states(const char* name, std::initializer_list<StateRows> rows,
                          std::initializer_list<StateConstant> constants) {
    check(ranks_ == nullptr, name, ": states cannot be cut over ranks");
    const Buffer& dst = f32_of_tokens(name, rows.begin()->which, rows.begin()->index);
    for (const StateRows& part : rows) {
        const Buffer& buffer = f32_of_tokens(name, part.which, part.index);
        check_cols(name, part.which, buffer, part.cols);
        if (&part != rows.begin()) {
            check_overlap(name, dst, buffer, false);
        }
        part.to = buffer.matrix;
    }
    for (const StateConstant& constant : constants) {
        check_size(name, constant.which, constant.values, constant.size);
        if (constant.size > 0) {
            constant.to = keep(constant.values, constant.values.size());
        }
    }
}

// A scan whose rows and constants are bound; `values` of its layer's state are its own.
template <class Args, class Options>
void Program::add_scan(const char* name, Args args, const Options& options, int64_t values) {
    check(options.offset >= 0, name, ": offset ", options.offset);
    args.state_offset = options.offset;
    push({Rows::Tokens, Recurrent<Args>{args, options.layer, options.offset + values}});
}

void Program::short_conv(int dst, int src, const ConvOptions& options) {
    const int64_t cols = f32_of_tokens("short_conv", "src", src).matrix.cols;
    const int64_t kernel = options.kernel;
    check(kernel >= 1 && kernel <= cpu::kMaxConvKernel, "short_conv: kernel is ", kernel,
          "; it must be between 1 and ", cpu::kMaxConvKernel);
    cpu::ConvArgs args{.kernel = kernel, .activation = options.activation};
    bind_states("short_conv", {{"dst", dst, cols, args.dst}, {"src", src, cols, args.src}},
                {{"weight", options.weight, kernel * cols, args.weight},
                 {"bias", options.bias, options.bias.empty() ? 0 : cols, args.bias}});
    push({Rows::Tokens, Recurrent<cpu::ConvArgs>{args, options.layer, (kernel - 1) * cols}});
}

void Program::ssd_scan(int dst, int xbc, int dt, const SsdOptions& options) {
    const int64_t heads = options.heads;
    const int64_t size = options.state_size;
    check(heads >= 1 && options.head_dim >= 1 && size >= 1 && options.groups >= 1 &&
              heads % options.groups == 0,
          "ssd_scan: ", heads, " heads of ", options.head_dim, " columns in ", options.groups,
          " groups of ", size);
    const int64_t cols = heads * options.head_dim;
    cpu::SsdArgs args{.heads = heads, .head_dim = options.head_dim};
    args.groups = options.groups;
    args.state_size = size;
    args.dt_min = options.dt_min;
    args.dt_max = options.dt_max;
    bind_states("ssd_scan",
                {{"dst", dst, cols, args.dst},
                 {"xbc", xbc, cols + 2 * options.groups * size, args.xbc},
                 {"dt", dt, heads, args.dt}},
                {{"a", options.a, heads, args.a},
                 {"d", options.d, heads, args.d},
                 {"dt_bias", options.dt_bias, heads, args.dt_bias}});
    add_scan("ssd_scan", args, options, size * cols);
}

void Program::delta_rule(int dst, int qkv, int gates, const DeltaOptions& options) {
    const int64_t heads = options.value_heads;
    check(options.key_heads >= 1 && heads >= 1 && heads % options.key_heads == 0 &&
              options.value_dim >= 1 && options.key_dim >= 1 && options.key_dim <= cpu::kMaxKeyDim,
          "delta_rule: ", heads, " value heads of ", options.value_dim, " columns, ",
          options.key_heads, " key heads of ", options.key_dim, ", of which there may be ",
          cpu::kMaxKeyDim);
    const int64_t cols = heads * options.value_dim;
    cpu::DeltaArgs args{.key_heads = options.key_heads, .value_heads = heads};
    args.key_dim = options.key_dim;
    args.value_dim = options.value_dim;
    bind_states(
        "delta_rule",
        {{"dst", dst, cols, args.dst},
         {"qkv", qkv, 2 * options.key_heads * options.key_dim + cols, args.qkv},
         {"gates", gates, 2 * heads, args.gates}},
        {{"a", options.a, heads, args.a}, {"dt_bias", options.dt_bias, heads, args.dt_bias}});
    add_scan("delta_rule", args, options, options.key_dim * cols);
}

void Program::selective_scan(const SelectiveBuffers& buffers, const SelectiveOptions& options) {
    const int64_t cols = f32_of_tokens("selective_scan", "dst", buffers.dst).matrix.cols;
    const int64_t size = options.state_size;
    check(size >= 1, "selective_scan: state_size ", size);
    cpu::SelectiveArgs args{.state_size = size};
    bind_states("selective_scan",
                {{"dst", buffers.dst, cols, args.dst},
                 {"x", buffers.x, cols, args.x},
                 {"dt", buffers.dt, cols, args.dt},
                 {"b", buffers.b, size, args.b},
                 {"c", buffers.c, size, args.c}},
                {{"a", options.a, size * cols, args.a},
                 {"d", options.d, cols, args.d},
                 {"dt_bias", options.dt_bias, cols, args.dt_bias}});
    add_scan("selective_scan", args, options, size * cols);
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
        std::visit(Overloaded{[&]<class Args>(const Recurrent<Args>& op) { check_op(op); },
                              [](const auto&) {}},
                   instruction.args);
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
