#include "program.h"

#include <algorithm>
#include <limits>

#include "common/check.h"

namespace octavo {

using cpu::kPanelRows;
using cpu::Matrix;

namespace {

constexpr int64_t kMaxRows = 1 << 24;
constexpr int64_t kAlignment = 64;

const char* name_of(Rows rows) { return rows == Rows::Tokens ? "T" : "S"; }

void check_cols(const char* name, const char* which, int64_t cols, int64_t expected) {
    check(cols == expected, name, ": ", which, " has ", cols, " columns; it must have ", expected);
}

void check_dtype(const char* name, const char* which, Dtype dtype, Dtype expected) {
    check(dtype == expected, name, ": ", which, " is ", octavo::name_of(dtype), "; it must be ",
          octavo::name_of(expected));
}

void check_rows(const char* name, Rows dst, Rows src) {
    check(dst == src, name, ": rows of dst are ", name_of(dst), ", those of src ", name_of(src));
}

}  // namespace

Program::Program(Team& team, int64_t arena_bytes, int64_t max_tokens, int64_t max_logit_rows,
                 int activation_bits, Ranks* ranks, Ranks* peers, bool joins_phases)
    : team_(team),
      ranks_(ranks),
      peers_(peers),
      max_tokens_(max_tokens),
      max_logit_rows_(max_logit_rows),
      activation_bits_(activation_bits),
      joins_phases_(joins_phases && (team.num_threads() > 1 || ranks != nullptr)) {
    check(activation_bits == 8 || activation_bits == 16, "Program: activation_bits is ",
          activation_bits, "; it must be 8 or 16");
    check(max_tokens >= 1 && max_tokens <= kMaxRows, "Program: max_tokens is ", max_tokens,
          "; it must be between 1 and ", kMaxRows);
    check(max_logit_rows >= 0 && max_logit_rows <= kMaxRows, "Program: max_logit_rows is ",
          max_logit_rows, "; it must be between 0 and ", kMaxRows);
    for (const Ranks* others : {ranks, peers}) {
        check(others == nullptr || others->workers_per_rank() == team.num_threads(),
              "Program: ", team.num_threads(), " threads; every rank must have the same number");
    }
    check(ranks == nullptr || peers == nullptr,
          "Program: ranks and peers; there may be one of them");
    arena_ = ranks == nullptr ? Memory(arena_bytes) : ranks->share(arena_bytes);
    limits_ = {max_tokens,
               max_logit_rows,
               std::numeric_limits<int32_t>::max(),
               std::numeric_limits<int32_t>::max(),
               0,
               1 << 30,
               0,
               false,
               false};
}

int Program::buffer(int64_t offset, int64_t cols, Dtype dtype, Rows rows) {
    check(offset >= 0 && offset % kAlignment == 0, "buffer: offset ", offset,
          " is not a multiple of ", kAlignment);
    check(cols >= 1 && cols < (int64_t{1} << 31), "buffer: ", cols, " columns");
    const int64_t num_bytes = max_rows(rows) * cols * size_of(dtype);
    check(offset <= arena_.size() && num_bytes <= arena_.size() - offset, "buffer: bytes ", offset,
          " to ", offset + num_bytes, " of an arena of ", arena_.size());
    buffers_.push_back({Matrix{arena_.data() + offset, cols, dtype}, rows});
    return static_cast<int>(buffers_.size()) - 1;
}

void Program::embed(int dst, const Packed& table, float scale, cpu::EmbedOf of, int64_t offset) {
    const Buffer& to = at("embed", dst);
    check_dtype("embed", "dst", to.matrix.dtype, Dtype::F32);
    check_cols("embed", "dst", to.matrix.cols, table.cols());
    check_rows("embed", to.rows, Rows::Tokens);
    const Packed::Cut& cut = table.cut();
    check(!cut.of_halves, "embed: a table has no halves");
    check(offset >= 0 && offset < cut.total_rows, "embed: offset ", offset, " of a table of ",
          cut.total_rows, " rows");
    int64_t& limit = of == cpu::EmbedOf::Tokens      ? limits_.vocab_size
                     : of == cpu::EmbedOf::Positions ? limits_.max_positions
                                                     : limits_.num_types;
    limit = std::min(limit, cut.total_rows - offset);
    if (of == cpu::EmbedOf::Tokens && !table.is_cut() && !limits_.is_input) {
        limits_.input_cols = std::max(limits_.input_cols, to.matrix.cols);
    }
    push({to.rows, Embed{{to.matrix, table.panels(), nullptr, scale, of, offset - cut.first_row},
                         table.is_cut()}});
}

void Program::input(int dst, int64_t first, bool is_sparse) {
    const Buffer& to = at("input", dst);
    check_dtype("input", "dst", to.matrix.dtype, Dtype::F32);
    check_rows("input", to.rows, Rows::Tokens);
    check(first >= 0 && first < (int64_t{1} << 31), "input: from column ", first, " on");
    check(is_sparse || first > 0 || !limits_.is_input, "input: the step's rows are taken already");
    // What another program computed of a step has no more columns, and so no sparse ones.
    if (!is_sparse || !limits_.is_input) {
        limits_.input_cols = std::max(limits_.input_cols, first + to.matrix.cols);
    }
    limits_.is_input = limits_.is_input || !is_sparse;
    push({to.rows, Embed{.args = {.dst = to.matrix},
                         .is_cut = false,
                         .is_input = true,
                         .is_sparse = is_sparse,
                         .first = first}});
}

void Program::rms_norm(int dst, int src, std::span<const float> weight, float eps, int add,
                       float add_scale) {
    const cpu::NormArgs args = norm_args("rms_norm", dst, src, weight, eps, add, add_scale);
    push({at("rms_norm", dst).rows, args});
}

void Program::layer_norm(int dst, int src, std::span<const float> weight,
                         std::span<const float> bias, float eps, int add, float add_scale) {
    cpu::NormArgs args = norm_args("layer_norm", dst, src, weight, eps, add, add_scale);
    if (!bias.empty()) {
        check(bias.size() == weight.size(), "layer_norm: bias has ", bias.size(), " values for ",
              weight.size(), " columns");
        args.bias = keep(bias, bias.size());
    }
    push({at("layer_norm", dst).rows, LayerNorm{args}});
}

cpu::NormArgs Program::norm_args(const char* name, int dst, int src, std::span<const float> weight,
                                 float eps, int add, float add_scale) {
    const Buffer& to = at(name, dst);
    const Buffer& from = at(name, src);
    check_dtype(name, "src", from.matrix.dtype, Dtype::F32);
    check_cols(name, "dst", to.matrix.cols, from.matrix.cols);
    check_rows(name, to.rows, from.rows);
    check_overlap(name, to, from, true);
    check(static_cast<int64_t>(weight.size()) == from.matrix.cols, name, ": weight has ",
          weight.size(), " values for ", from.matrix.cols, " columns");
    cpu::NormArgs args{to.matrix, from.matrix, nullptr, eps, nullptr, add_scale};
    if (add >= 0) {
        const Buffer& added = at(name, add);
        check_dtype(name, "add", added.matrix.dtype, Dtype::F32);
        check_cols(name, "add", added.matrix.cols, from.matrix.cols);
        check_rows(name, from.rows, added.rows);
        check_overlap(name, from, added, false);
        check_overlap(name, to, added, true);
        args.add = reinterpret_cast<const float*>(added.matrix.data);
    }
    args.weight = keep(weight, weight.size());
    return args;
}

void Program::linear(int dst, int src, const Packed& weight, std::span<const float> bias,
                     cpu::LinearMode mode, cpu::Activation activation, float scale,
                     const AdapterOptions& adapters) {
    const Buffer& to = at("linear", dst);
    const Buffer& from = at("linear", src);
    const Packed::Cut& cut = weight.cut();
    const bool takes_bf16 = weight.panels().packing() == cpu::Packing::BF16;
    check_dtype("linear", "src", from.matrix.dtype, takes_bf16 ? Dtype::BF16 : Dtype::F32);
    check_cols("linear", "src", from.matrix.cols, weight.cols());
    check_rows("linear", to.rows, from.rows);
    check_overlap("linear", to, from, false);
    if (mode == cpu::LinearMode::Glu) {
        check(weight.rows() % (2 * kPanelRows) == 0, "linear: mode glu of ", weight.rows(),
              " weight rows; each half must be a multiple of ", kPanelRows);
        check(cut.of_halves || !weight.is_cut(), "linear: mode glu of some of the weight's rows");
        check(activation != cpu::Activation::None, "linear: mode glu needs an activation");
        check_cols("linear", "dst", to.matrix.cols, cut.total_rows / 2);
    } else {
        const bool has_activation = activation != cpu::Activation::None;
        check(activation != cpu::Activation::SwigluClamped,
              "linear: swiglu_clamped needs mode glu");
        check(!has_activation || mode == cpu::LinearMode::Store,
              "linear: an activation needs mode store or glu");
        check(!cut.of_halves, "linear: parts of two halves need mode glu");
        check_cols("linear", "dst", to.matrix.cols, cut.total_rows);
        if (!has_activation) {
            check_dtype("linear", "dst", to.matrix.dtype, Dtype::F32);
        }
    }
    check(mode == cpu::LinearMode::Add || scale == 1.0F, "linear: scale ", scale,
          " needs mode add");
    cpu::LinearArgs args{to.matrix, from.matrix, 0,     weight.panels(), nullptr,
                         mode,      activation,  scale, cut.first_row,   activation_bits_};
    if (!bias.empty()) {
        check(static_cast<int64_t>(bias.size()) == weight.rows(), "linear: bias has ", bias.size(),
              " values for ", weight.rows(), " weight rows");
        args.bias = keep(bias, static_cast<size_t>(args.weight.count() * kPanelRows));
    }
    scratch_bytes_ = std::max(scratch_bytes_, team_.kernels().linear_scratch_bytes(args.weight));
    if (args.weight.is_quantized()) {
        args.in_tiles = true;
        quantize(from, args);
    }
    if (adapters.slots != nullptr) {
        adapt(to, from, weight, adapters, args);
    }
    push({to.rows, Product{args, weight.is_cut()}});
}

// What shrinks the rows of a linear layer, before it.
void Program::adapt(const Buffer& to, const Buffer& src, const Packed& weight,
                    const AdapterOptions& options, cpu::LinearArgs& args) {
    const AdapterSlots& slots = *options.slots;
    const AdapterSite& site = slots.site(options.site);
    const Packed::Cut& cut = weight.cut();
    check(site.rows() == cut.total_rows && site.cols == weight.cols(), "linear: adapter site ",
          options.site, " is of ", site.rows(), " x ", site.cols, ", the weight of ",
          cut.total_rows, " x ", weight.cols());
    check(site.own_rows() == weight.rows() && site.own.front().first == cut.first_row,
          "linear: adapter site ", options.site, " has other outputs than the weight");
    check(adapters_ == nullptr || adapters_ == &slots, "linear: adapters of two sets of slots");
    const Buffer& u = at("linear", options.u);
    check_dtype("linear", "u", u.matrix.dtype, Dtype::F32);
    check_cols("linear", "u", u.matrix.cols, slots.shrunken_cols(options.site));
    check_rows("linear", u.rows, src.rows);
    check_overlap("linear", u, src, false);
    check_overlap("linear", u, to, false);
    check(src.matrix.dtype == Dtype::F32 || slots.dtype() == Dtype::BF16,
          "linear: adapters in f32 for rows in bf16");
    adapters_ = &slots;
    limits_.num_adapter_slots = slots.num_slots();
    args.adapters = slots.of_site(options.site);
    args.u = u.matrix;
    scratch_bytes_ =
        std::max(scratch_bytes_, team_.kernels().shrink_scratch_bytes(src.matrix.cols));
    const cpu::ShrinkArgs shrink{
        .src = src.matrix, .u = u.matrix, .dtype = slots.dtype(), .adapters = args.adapters};
    push({src.rows, Shrink{shrink}});
}

// Rows of a linear layer of integers, before it.
void Program::quantize(const Buffer& src, const cpu::LinearArgs& args) {
    const int64_t rows = (max_rows(src.rows) + kPanelRows - 1) / kPanelRows * kPanelRows;
    quantized_bytes_ = std::max(quantized_bytes_, rows * team_.kernels().quantized_row_bytes(args));
    push({src.rows, Quantize{args}});
}

void Program::attention(int dst, int qkv, const AttentionOptions& options) {
    const Buffer& to = at("attention", dst);
    const Buffer& from = at("attention", qkv);
    const AttentionShape& shape = options.shape;
    check(shape.num_kv_heads >= 1 && shape.num_heads >= 1 &&
              shape.num_heads % shape.num_kv_heads == 0 && shape.num_heads <= 65536,
          "attention: ", shape.num_heads, " heads and ", shape.num_kv_heads,
          " KV heads; the first must be a multiple of the second");
    check(shape.head_dim >= kPanelRows && shape.head_dim % kPanelRows == 0 &&
              shape.head_dim <= cpu::kMaxHeadDim,
          "attention: head_dim is ", shape.head_dim, "; it must be a multiple of ", kPanelRows,
          " up to ", cpu::kMaxHeadDim);
    check(options.layer >= 0, "attention: layer ", options.layer);
    check(shape.window >= 0, "attention: window ", shape.window);
    check(shape.group >= 0, "attention: group ", shape.group);
    check_dtype("attention", "qkv", from.matrix.dtype, Dtype::F32);
    const cpu::HeadRange& heads = options.heads;
    check(heads.num_heads >= 1 && heads.num_heads <= 65536 && heads.num_kv_heads >= 1 &&
              heads.num_kv_heads <= heads.num_heads && heads.first_head >= 0 &&
              heads.first_kv_head >= 0 && heads.first_head + shape.num_heads <= heads.num_heads &&
              heads.first_kv_head + shape.num_kv_heads <= heads.num_kv_heads,
          "attention: ", shape.num_heads, " heads from ", heads.first_head, " on and ",
          shape.num_kv_heads, " KV heads from ", heads.first_kv_head, " on, of ", heads.num_heads,
          " and ", heads.num_kv_heads);
    check_cols("attention", "qkv", from.matrix.cols,
               (heads.num_heads + 2 * heads.num_kv_heads) * shape.head_dim);
    check_cols("attention", "dst", to.matrix.cols, heads.num_heads * shape.head_dim);
    check_rows("attention", to.rows, Rows::Tokens);
    check_rows("attention", to.rows, from.rows);
    check_overlap("attention", to, from, false);
    const int64_t rotary = options.rotary_dim;
    check(rotary >= 0 && rotary % 2 == 0 && rotary <= shape.head_dim, "attention: rotary_dim is ",
          rotary, "; it must be even and at most head_dim, ", shape.head_dim);
    if (rotary > 0) {
        const auto size = static_cast<int64_t>(options.cos_sin.size());
        check(size >= rotary && size % rotary == 0, "attention: cos_sin has ", size,
              " values; it must have whole rows of rotary_dim, ", rotary);
        limits_.max_positions = std::min(limits_.max_positions, size / rotary);
    }
    Attention instruction{};
    instruction.layer = options.layer;
    instruction.plan = plan_for(shape);
    cpu::AttentionArgs& args = instruction.args;
    args.dst = to.matrix;
    args.qkv = from.matrix;
    args.kv.num_kv_heads = shape.num_kv_heads;
    args.kv.head_dim = shape.head_dim;
    args.num_heads = shape.num_heads;
    args.heads = heads;
    args.rotary_dim = rotary;
    args.window = shape.window;
    check(!shape.is_chunked || (shape.window > 0 && shape.is_causal),
          "attention: chunks need a length and causal attention");
    args.is_chunked = shape.is_chunked;
    check(!shape.is_segmented || (!shape.is_causal && options.is_whole && shape.window == 0),
          "attention: segments are of whole sequences, in both directions and without a window");
    const auto& sections = options.rope_sections;
    const int64_t num_pairs = sections[0] + sections[1] + sections[2];
    check(std::ranges::min(sections) >= 0 && (num_pairs == 0 || 2 * num_pairs == rotary),
          "attention: rope_sections are of ", num_pairs, " pairs of columns; rotary_dim is ",
          rotary);
    args.rope_sections = sections;
    args.rope_interleaved = options.rope_interleaved;
    for (int64_t axis = 1; axis < cpu::kRopeAxes && options.rope_interleaved; ++axis) {
        const int64_t count = sections[static_cast<size_t>(axis)];
        check(cpu::kRopeAxes * (count - 1) + axis < num_pairs, "attention: every third of ",
              num_pairs, " pairs of columns cannot be ", count, " for axis ", axis);
    }
    args.cos_sin = options.cos_sin.data();
    args.scale = options.scale;
    args.soft_cap = options.soft_cap;
    args.norm_eps = options.norm_eps;
    args.is_causal = shape.is_causal;
    check(shape.is_causal || options.is_whole,
          "attention: only whole sequences can see their later tokens");
    limits_.is_whole = limits_.is_whole || options.is_whole;
    add_head_norms(options, args);
    if (!options.alibi.empty()) {
        check(static_cast<int64_t>(options.alibi.size()) == heads.num_heads,
              "attention: alibi has ", options.alibi.size(), " values for ", heads.num_heads,
              " heads");
        args.alibi = keep(options.alibi, options.alibi.size()) + heads.first_head;
    }
    if (!options.sinks.empty()) {
        check(static_cast<int64_t>(options.sinks.size()) == heads.num_heads,
              "attention: sinks has ", options.sinks.size(), " values for ", heads.num_heads,
              " heads");
        args.sinks = keep(options.sinks, options.sinks.size()) + heads.first_head;
    }
    if (!options.query_scales.empty()) {
        args.query_scales = options.query_scales.data();
        limits_.max_positions =
            std::min(limits_.max_positions, static_cast<int64_t>(options.query_scales.size()));
    }
    const int64_t query_bytes = max_tokens_ * shape.num_heads * shape.head_dim * 4;
    if (queries_.size() < query_bytes) {
        queries_ = Memory(query_bytes);
    }
    scratch_bytes_ = std::max(
        scratch_bytes_, team_.kernels().attend_scratch_bytes(args.group(), shape.head_dim, 0));
    push({to.rows, instruction});
}

void Program::add_head_norms(const AttentionOptions& options, cpu::AttentionArgs& args) {
    args.norm = options.norm;
    args.norm_after_rope = options.norm_after_rope;
    check(options.norm != cpu::HeadNorm::Row || !options.norm_after_rope,
          "attention: a norm of all heads goes before the rope");
    const AttentionShape& shape = options.shape;
    const auto size_of = [](std::span<const float> norm) {
        return static_cast<int64_t>(norm.size());
    };
    const cpu::HeadRange& heads = options.heads;
    args.norm_by_head = size_of(options.q_norm) == heads.num_heads * shape.head_dim &&
                        (heads.num_heads > 1 || options.norm == cpu::HeadNorm::Row);
    struct Of {
        std::span<const float> norm;
        int64_t heads;
        const float** to_fill;
    };
    for (const Of& of : {Of{options.q_norm, heads.num_heads, &args.q_norm},
                         Of{options.k_norm, heads.num_kv_heads, &args.k_norm}}) {
        if (!of.norm.empty()) {
            check(size_of(of.norm) == shape.head_dim * (args.norm_by_head ? of.heads : 1),
                  "attention: q_norm or k_norm has ", of.norm.size(), " values for head_dim ",
                  shape.head_dim, " and ", of.heads, " heads");
            *of.to_fill = keep(of.norm, of.norm.size());
        }
    }
    check(options.norm != cpu::HeadNorm::Row || args.norm_by_head,
          "attention: a norm of all heads needs a weight for each of their columns");
}

size_t Program::plan_for(const AttentionShape& shape) {
    for (size_t i = 0; i < plans_.size(); ++i) {
        if (plans_[i].shape() == shape) {
            return i;
        }
    }
    plans_.emplace_back(shape);
    return plans_.size() - 1;
}

const Buffer& Program::readable(int index, int64_t num_rows) const {
    const Buffer& buffer = at("read", index);
    check(num_rows >= 0 && num_rows <= max_rows(buffer.rows), "read: ", num_rows,
          " rows of a buffer of ", max_rows(buffer.rows));
    return buffer;
}

const Buffer& Program::at(const char* name, int index) const {
    check(index >= 0 && index < static_cast<int>(buffers_.size()), name, ": there is no buffer ",
          index, "; ", buffers_.size(), " were declared");
    return buffers_[static_cast<size_t>(index)];
}

int64_t Program::max_rows(Rows rows) const {
    return rows == Rows::Tokens ? max_tokens_ : max_logit_rows_;
}

// Rows are computed by several threads at once: dst may share src's memory only if each row's
// result lies exactly where the row was.
void Program::check_overlap(const char* name, const Buffer& dst, const Buffer& src,
                            bool in_place) const {
    const auto bytes = [&](const Buffer& b) {
        return max_rows(b.rows) * b.matrix.cols * size_of(b.matrix.dtype);
    };
    const bool is_same = dst.matrix.data == src.matrix.data && dst.matrix.cols == src.matrix.cols &&
                         dst.matrix.dtype == src.matrix.dtype;
    const bool is_apart = dst.matrix.data + bytes(dst) <= src.matrix.data ||
                          src.matrix.data + bytes(src) <= dst.matrix.data;
    check(is_apart || (is_same && in_place), name, ": dst at ", dst.matrix.data - arena_.data(),
          " overlaps what it reads at ", src.matrix.data - arena_.data());
}

float* Program::keep(std::span<const float> values, size_t padded) {
    std::vector<float>& kept = constants_.emplace_back(values.begin(), values.end());
    kept.resize(padded, 0.0F);
    return kept.data();
}

void Program::row_op(const char* name, int dst, int src, const cpu::RowOpArgs& args) {
    const Buffer& to = at(name, dst);
    const Buffer& from = at(name, src);
    check_rows(name, to.rows, from.rows);
    const bool is_glu = args.op == cpu::RowOp::Glu;
    check_cols(name, "src", from.matrix.cols, to.matrix.cols * (is_glu ? 2 : 1));
    check_overlap(name, to, from, !is_glu);
    cpu::RowOpArgs complete = args;
    complete.dst = to.matrix;
    complete.src = from.matrix;
    push({to.rows, complete});
}

void Program::glu(int dst, int src, cpu::Activation activation) {
    check(activation != cpu::Activation::None, "glu needs an activation");
    row_op("glu", dst, src, {.op = cpu::RowOp::Glu, .activation = activation});
}

void Program::activation(int dst, int src, cpu::Activation activation) {
    check(activation != cpu::Activation::None, "activation needs a name");
    check(activation != cpu::Activation::SwigluClamped,
          "activation: swiglu_clamped is of two halves");
    row_op("activation", dst, src, {.op = cpu::RowOp::Activation, .activation = activation});
}

void Program::add(int dst, int x, int y, float scale) {
    const Buffer& added = at("add", y);
    const Buffer& to = at("add", dst);
    check_dtype("add", "y", added.matrix.dtype, Dtype::F32);
    check_cols("add", "y", added.matrix.cols, to.matrix.cols);
    check_rows("add", to.rows, added.rows);
    check_overlap("add", to, added, true);
    row_op("add", dst, x, {.op = cpu::RowOp::Add, .other = added.matrix, .factor = scale});
}

void Program::scale(int dst, int src, float factor) {
    row_op("scale", dst, src, {.op = cpu::RowOp::Scale, .factor = factor});
}

void Program::soft_cap(int dst, int src, float cap) {
    check(cap > 0, "soft_cap: cap is ", cap, "; it must be above 0");
    row_op("soft_cap", dst, src, {.op = cpu::RowOp::SoftCap, .factor = cap});
}

void Program::clamp(int dst, int src, float limit) {
    check(limit > 0, "clamp: limit is ", limit, "; it must be above 0");
    row_op("clamp", dst, src, {.op = cpu::RowOp::Clamp, .factor = limit});
}

void Program::gate(int dst, int src, int scores) {
    const Buffer& to = at("gate", dst);
    const Buffer& from = at("gate", src);
    const Buffer& score = at("gate", scores);
    check_dtype("gate", "scores", score.matrix.dtype, Dtype::F32);
    check_cols("gate", "scores", score.matrix.cols, 1);
    check_cols("gate", "src", from.matrix.cols, to.matrix.cols);
    check_rows("gate", to.rows, from.rows);
    check_rows("gate", to.rows, score.rows);
    check_overlap("gate", to, from, true);
    check_overlap("gate", to, score, false);
    const cpu::RowOpArgs scale{.op = cpu::RowOp::Scale, .dst = to.matrix, .src = from.matrix};
    push({to.rows, Gate{scale, score.matrix}});
}

void Program::convert(int dst, int src) {
    row_op("convert", dst, src, {.op = cpu::RowOp::Convert});
}

void Program::select_rows(int dst, int src) {
    const Buffer& to = at("select_rows", dst);
    const Buffer& from = at("select_rows", src);
    check(to.rows == Rows::Selected && from.rows == Rows::Tokens,
          "select_rows: rows of dst must be S and those of src T; they are ", name_of(to.rows),
          " and ", name_of(from.rows));
    check_cols("select_rows", "dst", to.matrix.cols, from.matrix.cols);
    check_overlap("select_rows", to, from, false);
    cpu::RowOpArgs args{.op = cpu::RowOp::Select, .dst = to.matrix, .src = from.matrix};
    push({to.rows, args});
}

void Program::pool(int dst, int src, cpu::PoolKind kind) {
    const Buffer& to = at("pool", dst);
    const Buffer& from = at("pool", src);
    check(to.rows == Rows::Selected && from.rows == Rows::Tokens,
          "pool: rows of dst must be S and those of src T; they are ", name_of(to.rows), " and ",
          name_of(from.rows));
    check_cols("pool", "dst", to.matrix.cols, from.matrix.cols);
    check_dtype("pool", "dst", to.matrix.dtype, Dtype::F32);
    check_dtype("pool", "src", from.matrix.dtype, Dtype::F32);
    check_overlap("pool", to, from, false);
    limits_.is_whole = limits_.is_pooled = true;
    push({to.rows, cpu::PoolArgs{to.matrix, from.matrix, kind, nullptr}});
}

}  // namespace octavo
