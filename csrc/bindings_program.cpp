// KVCache and Program in Python.
#include <algorithm>
#include <array>

#include "bindings.h"
#include "common/check.h"
#include "program.h"

namespace octavo {

namespace {

using nb::arg;

Rows parse_rows(const std::string& name) {
    check(name == "T" || name == "S", "rows '", name, "' is not known; there are: T, S");
    return name == "T" ? Rows::Tokens : Rows::Selected;
}

cpu::Activation parse_activation(const std::string& name) {
    using enum cpu::Activation;
    constexpr std::array<std::pair<const char*, cpu::Activation>, 9> known{
        {{"", None},
         {"silu", Silu},
         {"gelu", Gelu},
         {"gelu_tanh", GeluTanh},
         {"relu", Relu},
         {"relu2", Relu2},
         {"tanh", Tanh},
         {"sigmoid", Sigmoid},
         {"swiglu_clamped", SwigluClamped}}};
    for (const auto& [known_name, activation] : known) {
        if (name == known_name) {
            return activation;
        }
    }
    fail("activation '", name, "' is not known; there are: silu, gelu, gelu_tanh, relu, relu2, ",
         "tanh, sigmoid, swiglu_clamped");
}

cpu::HeadNorm parse_head_norm(const std::string& name) {
    if (name == "rms") {
        return cpu::HeadNorm::Rms;
    }
    if (name == "layer") {
        return cpu::HeadNorm::Layer;
    }
    check(name == "row", "attention: norm '", name, "' is not known; there are: rms, layer, row");
    return cpu::HeadNorm::Row;
}

cpu::LinearMode parse_mode(const std::string& name) {
    if (name == "store") {
        return cpu::LinearMode::Store;
    }
    if (name == "add") {
        return cpu::LinearMode::Add;
    }
    check(name == "glu", "linear: mode '", name, "' is not known; there are: store, add, glu");
    return cpu::LinearMode::Glu;
}

cpu::EmbedOf parse_embed_of(const std::string& name) {
    if (name == "tokens") {
        return cpu::EmbedOf::Tokens;
    }
    if (name == "positions") {
        return cpu::EmbedOf::Positions;
    }
    check(name == "types", "embed: of '", name, "' is not known; there are: tokens, positions, ",
          "types");
    return cpu::EmbedOf::Types;
}

cpu::PoolKind parse_pool_kind(const std::string& name) {
    using enum cpu::PoolKind;
    constexpr std::array<std::pair<const char*, cpu::PoolKind>, 4> known{
        {{"mean", Mean},
         {"max", Max},
         {"mean_sqrt_len", MeanSqrtLength},
         {"weightedmean", WeightedMean}}};
    for (const auto& [known_name, kind] : known) {
        if (name == known_name) {
            return kind;
        }
    }
    fail("pool: '", name, "' is not known; there are: mean, max, mean_sqrt_len, weightedmean");
}

void copy_blocks(KVCache& kv, const IntTable& copies) {
    check(copies.shape(1) == 3, "copy: copies has ", copies.shape(1), " columns; it must have 3");
    const nb::gil_scoped_release release;
    for (size_t i = 0; i < copies.shape(0); ++i) {
        const int32_t* row = copies.data() + 3 * i;
        kv.copy(row[0], row[1], row[2]);
    }
}

void poison_blocks(KVCache& kv, const std::vector<int64_t>& block_ids) {
    for (const int64_t block : block_ids) {
        kv.poison(block);
    }
}

using Page = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadOnlyPage = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_page(const char* what, size_t size, int64_t wanted) {
    check(static_cast<int64_t>(size) == wanted, what, ": a page of ", size, " bytes; it must have ",
          wanted);
}

void save_block(const KVCache& kv, int64_t block, const Page& page) {
    check_page("save", page.size(), kv.bytes_per_block());
    kv.save(block, reinterpret_cast<std::byte*>(page.data()));
}

void load_block(KVCache& kv, int64_t block, const ReadOnlyPage& page) {
    check_page("load", page.size(), kv.bytes_per_block());
    kv.load(block, reinterpret_cast<const std::byte*>(page.data()));
}

nb::object read_block(const KVCache& kv, int64_t layer, int64_t block) {
    check(layer >= 0 && layer < kv.num_layers(), "read: layer ", layer, " of ", kv.num_layers());
    const cpu::KVLayer& shape = kv.layer(layer);
    const std::array<size_t, 3> sides{static_cast<size_t>(shape.num_kv_heads), 16,
                                      static_cast<size_t>(shape.head_dim)};
    NewArray<float, 3> keys(sides);
    NewArray<float, 3> values(sides);
    kv.read(layer, block, keys.data, values.data);
    return nb::make_tuple(nb::cast(keys.array), nb::cast(values.array));
}

using PartFields = std::tuple<int64_t, int64_t, int64_t, int64_t>;

void bind_kv_cache(nb::module_& module) {
    nb::class_<KVCache>(module, "KVCache")
        .def(
            "__init__",
            [](KVCache* self, int64_t num_blocks, const std::vector<PartFields>& layers,
               std::vector<int64_t> windows, const std::string& dtype,
               const std::vector<int64_t>& latent_ranks) {
                check(latent_ranks.empty() || latent_ranks.size() == layers.size(),
                      "KVCache: latent_ranks has ", latent_ranks.size(), " values for ",
                      layers.size(), " layers");
                std::vector<KVPart> parts;
                for (const auto& [group, region, num_kv_heads, head_dim] : layers) {
                    const int64_t rank = latent_ranks.empty() ? 0 : latent_ranks[parts.size()];
                    parts.push_back({group, region, num_kv_heads, head_dim, rank});
                }
                new (self) KVCache(num_blocks, std::move(parts), std::move(windows),
                                   parse_kv_format(dtype));
            },
            arg("num_blocks"), arg("layers"), arg("windows"), arg("dtype"),
            arg("latent_ranks") = std::vector<int64_t>{})
        .def_prop_ro("bytes_per_block", &KVCache::bytes_per_block)
        .def("copy", &copy_blocks, arg("copies").noconvert())
        .def("poison", &poison_blocks, arg("block_ids"))
        .def("save", &save_block, arg("block"), arg("page").noconvert())
        .def("load", &load_block, arg("block"), arg("page").noconvert())
        .def("read", &read_block, arg("layer"), arg("block"));
}

using CosSin = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void add_latent_attention(Program& program, int dst, int q, int kv, int nope, int mixed,
                          const std::vector<const Packed*>& key_up,
                          const std::vector<const Packed*>& value_up, int64_t layer,
                          int64_t num_heads, int64_t first_head, int64_t rank, float scale,
                          const CosSin& cos_sin, bool turns_neighbours, const Floats& kv_norm,
                          float norm_eps, int64_t window, int64_t group) {
    program.latent_attention({dst, q, kv, nope, mixed},
                             {.layer = layer,
                              .num_heads = num_heads,
                              .first_head = first_head,
                              .rank = rank,
                              .key_up = key_up,
                              .value_up = value_up,
                              .scale = scale,
                              .rope_dim = static_cast<int64_t>(cos_sin.shape(1)),
                              .cos_sin = span_of(std::optional(cos_sin)),
                              .turns_neighbours = turns_neighbours,
                              .kv_norm = span_of(kv_norm),
                              .norm_eps = norm_eps,
                              .window = window,
                              .group = group});
}

// `own_heads`: the first one that this process computes and how many, then the same of KV heads.
void add_attention(
    Program& program, int dst, int qkv, int64_t layer, int64_t num_heads, int64_t num_kv_heads,
    int64_t head_dim, float scale, int64_t rotary_dim,
    const std::optional<nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>>&
        cos_sin,
    int64_t window, float soft_cap, const std::optional<Floats>& q_norm,
    const std::optional<Floats>& k_norm, float norm_eps, const std::string& norm,
    bool norm_after_rope, const std::optional<Floats>& alibi, bool is_causal, bool is_whole,
    int64_t group, const std::optional<std::array<int64_t, 4>>& own_heads,
    const std::optional<Floats>& sinks, bool is_chunked, const std::optional<Floats>& query_scales,
    const std::optional<std::array<int64_t, cpu::kRopeAxes>>& rope_sections, bool is_segmented,
    bool rope_interleaved) {
    check(!cos_sin || static_cast<int64_t>(cos_sin->shape(1)) == rotary_dim,
          "attention: cos_sin has ", cos_sin ? cos_sin->shape(1) : 0, " columns; rotary_dim is ",
          rotary_dim);
    const auto [first_head, own_count, first_kv_head, own_kv_count] =
        own_heads.value_or(std::array<int64_t, 4>{0, num_heads, 0, num_kv_heads});
    program.attention(
        dst, qkv,
        {.layer = layer,
         .shape = {own_count, own_kv_count, head_dim, window, is_causal, group, 0, is_chunked,
                   is_segmented},
         .heads = {num_heads, num_kv_heads, first_head, first_kv_head},
         .scale = scale,
         .rotary_dim = rotary_dim,
         .cos_sin = span_of(cos_sin),
         .soft_cap = soft_cap,
         .q_norm = span_of(q_norm),
         .k_norm = span_of(k_norm),
         .norm_eps = norm_eps,
         .norm = parse_head_norm(norm),
         .norm_after_rope = norm_after_rope,
         .alibi = span_of(alibi),
         .is_whole = is_whole,
         .sinks = span_of(sinks),
         .query_scales = span_of(query_scales),
         .rope_sections = rope_sections.value_or(std::array<int64_t, cpu::kRopeAxes>{}),
         .rope_interleaved = rope_interleaved});
}

using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

StoredDtype stored_dtype(const std::string& name) {
    if (name == "F32") {
        return StoredDtype::F32;
    }
    if (name == "F16") {
        return StoredDtype::F16;
    }
    check(name == "BF16", "PackedAdapter: dtype ", name, "; it must be F32, F16 or BF16");
    return StoredDtype::BF16;
}

// A dtype of a file, and the bytes of each row.
using StoredTable =
    std::pair<std::string, nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;

StoredMatrix matrix_of(const StoredTable& table) {
    const auto& [name, bytes] = table;
    const StoredDtype dtype = stored_dtype(name);
    const auto row_bytes = static_cast<int64_t>(bytes.shape(1));
    check(row_bytes % size_of(dtype) == 0, "PackedAdapter: rows of ", row_bytes,
          " bytes are not whole numbers of ", name);
    return {reinterpret_cast<const std::byte*>(bytes.data()), dtype,
            static_cast<int64_t>(bytes.shape(0)), row_bytes / size_of(dtype)};
}

// part, down, up, scale
using PartTuple = std::tuple<int64_t, StoredTable, StoredTable, float>;

void make_adapter(PackedAdapter* self, const AdapterSlots& slots,
                  const std::vector<std::pair<int64_t, std::vector<PartTuple>>>& added) {
    std::vector<AdapterAddition> all;
    for (const auto& [site, parts] : added) {
        AdapterAddition& addition = all.emplace_back(AdapterAddition{site, {}});
        for (const auto& [part, down, up, scale] : parts) {
            addition.parts.push_back({part, matrix_of(down), matrix_of(up), scale});
        }
    }
    const nb::gil_scoped_release release;
    new (self) PackedAdapter(slots, all);
}

int64_t add_adapter_site(AdapterSlots& slots, std::vector<int64_t> sizes, int64_t cols,
                         const std::vector<std::pair<int64_t, int64_t>>& own) {
    std::vector<OutputRange> ranges;
    for (const auto& [first, end] : own) {
        ranges.push_back({first, end});
    }
    return slots.add_site(std::move(sizes), cols, std::move(ranges));
}

void bind_adapters(nb::module_& module) {
    nb::class_<PackedAdapter>(module, "PackedAdapter")
        .def("__init__", &make_adapter, arg("slots"), arg("added"))
        .def_prop_ro("nbytes", &PackedAdapter::num_bytes);
    nb::class_<AdapterSlots>(module, "AdapterSlots")
        .def(
            "__init__",
            [](AdapterSlots* self, int64_t num_slots, int64_t max_rank, const std::string& dtype) {
                new (self) AdapterSlots(num_slots, max_rank, parse_dtype(dtype));
            },
            arg("num_slots"), arg("max_rank"), arg("dtype"))
        .def("add_site", &add_adapter_site, arg("sizes"), arg("cols"), arg("own"))
        .def("shrunken_cols", &AdapterSlots::shrunken_cols, arg("site"))
        .def("set", &AdapterSlots::set, arg("slot"), arg("adapter").none())
        .def(
            "prepare_spare",
            [](AdapterSlots& self, int64_t num_bytes) {
                const std::shared_ptr<SpareMemory> spare = self.spare();
                const nb::gil_scoped_release release;
                spare->prepare(num_bytes);
            },
            arg("num_bytes"))
        .def_prop_ro("spare_bytes",
                     [](const AdapterSlots& self) { return self.spare()->num_bytes(); });
}

void copy_states(StateCache& states, const IntTable& copies) {
    check(copies.shape(1) == 2, "copy: copies has ", copies.shape(1), " columns; it must have 2");
    const nb::gil_scoped_release release;
    for (size_t i = 0; i < copies.shape(0); ++i) {
        states.copy(copies.data()[2 * i], copies.data()[2 * i + 1]);
    }
}

void poison_states(StateCache& states, const std::vector<int64_t>& slots) {
    for (const int64_t slot : slots) {
        states.poison(slot);
    }
}

void save_states(const StateCache& states, int64_t slot, const Page& page) {
    check_page("save", page.size(), states.bytes_per_slot());
    const nb::gil_scoped_release release;
    states.save(slot, reinterpret_cast<std::byte*>(page.data()));
}

void load_states(StateCache& states, int64_t slot, const ReadOnlyPage& page) {
    check_page("load", page.size(), states.bytes_per_slot());
    const nb::gil_scoped_release release;
    states.load(slot, reinterpret_cast<const std::byte*>(page.data()));
}

void bind_states(nb::module_& module) {
    nb::class_<StateCache>(module, "StateCache")
        .def(nb::init<int64_t, std::vector<int64_t>>(), arg("num_slots"), arg("values"))
        .def_prop_ro("bytes_per_slot", &StateCache::bytes_per_slot)
        .def("copy", &copy_states, arg("copies").noconvert())
        .def("save", &save_states, arg("slot"), arg("page").noconvert())
        .def("load", &load_states, arg("slot"), arg("page").noconvert())
        .def("poison", &poison_states, arg("slots"));
}

// `sizes`: heads, head_dim, groups, state_size.
void add_ssd(Program& program, int dst, int xbc, int dt, int64_t layer, int64_t offset,
             const std::array<int64_t, 4>& sizes, const Floats& a, const Floats& d,
             const Floats& dt_bias, float dt_min, float dt_max) {
    program.ssd_scan(dst, xbc, dt,
                     {.layer = layer,
                      .offset = offset,
                      .heads = sizes[0],
                      .head_dim = sizes[1],
                      .groups = sizes[2],
                      .state_size = sizes[3],
                      .a = span_of(a),
                      .d = span_of(d),
                      .dt_bias = span_of(dt_bias),
                      .dt_min = dt_min,
                      .dt_max = dt_max});
}

// `sizes`: key heads, value heads, key_dim, value_dim.
void add_delta(Program& program, int dst, int qkv, int gates, int64_t layer, int64_t offset,
               const std::array<int64_t, 4>& sizes, const Floats& a, const Floats& dt_bias) {
    program.delta_rule(dst, qkv, gates,
                       {.layer = layer,
                        .offset = offset,
                        .key_heads = sizes[0],
                        .value_heads = sizes[1],
                        .key_dim = sizes[2],
                        .value_dim = sizes[3],
                        .a = span_of(a),
                        .dt_bias = span_of(dt_bias)});
}

// `sources`: x, dt, b, c.
void add_selective(Program& program, int dst, const std::array<int, 4>& sources, int64_t layer,
                   int64_t offset, int64_t state_size, const Floats& a, const Floats& d,
                   const Floats& dt_bias) {
    program.selective_scan({dst, sources[0], sources[1], sources[2], sources[3]},
                           {.layer = layer,
                            .offset = offset,
                            .state_size = state_size,
                            .a = span_of(a),
                            .d = span_of(d),
                            .dt_bias = span_of(dt_bias)});
}

void bind_streams(nb::class_<Program>& program) {
    program
        .def("mix", &Program::mix, arg("dst"), arg("src"), arg("weights"), arg("inputs"),
             arg("offset") = 0.0F)
        .def("match_rms", &Program::match_rms, arg("dst"), arg("src"), arg("like"), arg("floor"))
        .def("sparsify", &Program::sparsify, arg("dst"), arg("src"), arg("deviations"))
        .def(
            "scale_columns",
            [](Program& self, int dst, int src, const Floats& factors) {
                self.scale_columns(dst, src, span_of(factors));
            },
            arg("dst"), arg("src"), arg("factors").noconvert());
}

void bind_recurrent(nb::class_<Program>& program) {
    program.def("columns", &Program::columns, arg("dst"), arg("src"), arg("first"))
        .def("join", &Program::join, arg("dst"), arg("x"), arg("y"))
        .def(
            "multiply",
            [](Program& self, int dst, int x, int y, const std::string& activation) {
                self.multiply(dst, x, y, parse_activation(activation));
            },
            arg("dst"), arg("x"), arg("y"), arg("activation") = "")
        .def(
            "group_norm",
            [](Program& self, int dst, int src, const Floats& weight, float eps, int64_t size) {
                self.group_norm(dst, src, span_of(weight), eps, size);
            },
            arg("dst"), arg("src"), arg("weight").noconvert(), arg("eps"), arg("size"))
        .def(
            "short_conv",
            [](Program& self, int dst, int src, int64_t layer, int64_t kernel, const Floats& weight,
               const std::optional<Floats>& bias, const std::string& activation) {
                self.short_conv(
                    dst, src,
                    {layer, kernel, span_of(weight), span_of(bias), parse_activation(activation)});
            },
            arg("dst"), arg("src"), arg("layer"), arg("kernel"), arg("weight").noconvert(),
            arg("bias").noconvert().none() = nb::none(), arg("activation") = "")
        .def("ssd_scan", &add_ssd, arg("dst"), arg("xbc"), arg("dt"), arg("layer"), arg("offset"),
             arg("sizes"), arg("a").noconvert(), arg("d").noconvert(), arg("dt_bias").noconvert(),
             arg("dt_min"), arg("dt_max"))
        .def("delta_rule", &add_delta, arg("dst"), arg("qkv"), arg("gates"), arg("layer"),
             arg("offset"), arg("sizes"), arg("a").noconvert(), arg("dt_bias").noconvert())
        .def("selective_scan", &add_selective, arg("dst"), arg("sources"), arg("layer"),
             arg("offset"), arg("state_size"), arg("a").noconvert(), arg("d").noconvert(),
             arg("dt_bias").noconvert());
}

using Times = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void run_step(Program& program, const KVCache& kv, const Ints& token_ids, const Ints& positions,
              const IntTable& slots, const Ints& seq_starts, const Ints& seq_lens, const Ints& rows,
              const IntTables& block_tables, const Ints& logit_rows,
              const std::optional<Ints>& type_ids, const std::optional<Times>& op_times,
              const std::optional<Ints>& adapters, const std::optional<Ints>& input_rows,
              const std::optional<FloatTable>& inputs, const std::optional<Ints>& seen_to,
              const std::optional<IntTable>& rope_positions,
              const std::optional<Ints>& segment_starts, StateCache* states,
              const std::optional<Ints>& state_slots, const std::optional<Ints>& state_saves,
              const KVCache* cross, const std::optional<Ints>& cross_slots,
              const std::optional<FloatTable>& features, int64_t first_instruction,
              int64_t end_instruction) {
    check(input_rows.has_value() == inputs.has_value(),
          "step: input_rows and inputs come together");
    check(slots.shape(0) == block_tables.shape(0), "step: slots are of ", slots.shape(0),
          " groups, block_tables of ", block_tables.shape(0));
    const Step step{
        .token_ids = span_of(token_ids),
        .positions = span_of(positions),
        .slots = span_of(slots),
        .seq_starts = span_of(seq_starts),
        .seq_lens = span_of(seq_lens),
        .rows = span_of(rows),
        .block_tables = block_tables.data(),
        .num_groups = static_cast<int64_t>(block_tables.shape(0)),
        .table_rows = static_cast<int64_t>(block_tables.shape(1)),
        .table_cols = static_cast<int64_t>(block_tables.shape(2)),
        .logit_rows = span_of(logit_rows),
        .type_ids = span_of(type_ids),
        .adapters = span_of(adapters),
        .states = states,
        .state_slots = span_of(state_slots),
        .state_saves = span_of(state_saves),
        .input_rows = span_of(input_rows),
        .inputs = inputs ? inputs->data() : nullptr,
        .num_inputs = inputs ? static_cast<int64_t>(inputs->shape(0)) : 0,
        .input_cols = inputs ? static_cast<int64_t>(inputs->shape(1)) : 0,
        .seen_to = span_of(seen_to),
        .rope_positions = span_of(rope_positions),
        .segment_starts = span_of(segment_starts),
        .features = span_of(features),
        .cross_slots = span_of(cross_slots),
        .first_instruction = first_instruction,
        .end_instruction = end_instruction,
        .op_times = op_times ? std::span<int64_t>(op_times->data(), op_times->size())
                             : std::span<int64_t>(),
    };
    const nb::gil_scoped_release release;
    program.run(kv, step, cross);
}

// A view where the buffer holds floats, else a widened copy.
nb::object read_buffer(nb::handle self, int index, int64_t num_rows) {
    const auto& program = nb::cast<const Program&>(self);
    const cpu::Matrix& matrix = program.readable(index, num_rows).matrix;
    const std::array<size_t, 2> shape{static_cast<size_t>(num_rows),
                                      static_cast<size_t>(matrix.cols)};
    if (matrix.dtype == Dtype::F32) {
        return nb::cast(nb::ndarray<nb::numpy, float>(reinterpret_cast<float*>(matrix.data), 2,
                                                      shape.data(), self));
    }
    NewArray<float, 2> copy(shape);
    const auto* from = reinterpret_cast<const uint16_t*>(matrix.data);
    std::transform(from, from + num_rows * matrix.cols, copy.data, bf16_to_float);
    return nb::cast(copy.array);
}

}  // namespace

void bind_program(nb::module_& module) {
    bind_kv_cache(module);
    bind_adapters(module);
    bind_states(module);
    nb::class_<Program> program(module, "Program", nb::is_weak_referenceable());
    bind_recurrent(program);
    bind_streams(program);
    program
        .def(nb::init<Team&, int64_t, int64_t, int64_t, int, Ranks*, Ranks*, bool>(), arg("team"),
             arg("arena_bytes"), arg("max_tokens"), arg("max_logit_rows"),
             arg("activation_bits") = 16, arg("ranks").none() = nb::none(),
             arg("peers").none() = nb::none(), arg("joins_phases") = true, nb::keep_alive<1, 2>(),
             nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>())
        .def(
            "buffer",
            [](Program& self, int64_t offset, int64_t cols, const std::string& dtype,
               const std::string& rows) {
                return self.buffer(offset, cols, parse_dtype(dtype), parse_rows(rows));
            },
            arg("offset"), arg("cols"), arg("dtype"), arg("rows"))
        .def(
            "embed",
            [](Program& self, int dst, const Packed& table, float scale, const std::string& of,
               int64_t offset) { self.embed(dst, table, scale, parse_embed_of(of), offset); },
            arg("dst"), arg("table"), arg("scale"), arg("of") = "tokens", arg("offset") = 0,
            nb::keep_alive<1, 3>())
        .def("input", &Program::input, arg("dst"), arg("first") = 0, arg("is_sparse") = false)
        .def(
            "rms_norm",
            [](Program& self, int dst, int src, const Floats& weight, float eps, int add,
               float add_scale) { self.rms_norm(dst, src, span_of(weight), eps, add, add_scale); },
            arg("dst"), arg("src"), arg("weight").noconvert(), arg("eps"), arg("add") = -1,
            arg("add_scale") = 1.0F)
        .def(
            "layer_norm",
            [](Program& self, int dst, int src, const Floats& weight,
               const std::optional<Floats>& bias, float eps, int add, float add_scale) {
                self.layer_norm(dst, src, span_of(weight), span_of(bias), eps, add, add_scale);
            },
            arg("dst"), arg("src"), arg("weight").noconvert(), arg("bias").noconvert().none(),
            arg("eps"), arg("add") = -1, arg("add_scale") = 1.0F)
        .def(
            "linear",
            [](Program& self, int dst, int src, const Packed& weight,
               const std::optional<Floats>& bias, const std::string& mode,
               const std::string& activation, float scale, const AdapterSlots* adapters,
               int64_t site, int u) {
                self.linear(dst, src, weight, span_of(bias), parse_mode(mode),
                            parse_activation(activation), scale, {adapters, site, u});
            },
            arg("dst"), arg("src"), arg("weight"), arg("bias").noconvert().none() = nb::none(),
            arg("mode") = "store", arg("activation") = "", arg("scale") = 1.0F,
            arg("adapters").none() = nb::none(), arg("site") = 0, arg("u") = -1,
            nb::keep_alive<1, 4>(), nb::keep_alive<1, 9>())
        .def("attention", &add_attention, arg("dst"), arg("qkv"), arg("layer"), arg("num_heads"),
             arg("num_kv_heads"), arg("head_dim"), arg("scale"), arg("rotary_dim") = 0,
             arg("cos_sin").noconvert().none() = nb::none(), arg("window") = 0,
             arg("soft_cap") = 0.0F, arg("q_norm").noconvert().none() = nb::none(),
             arg("k_norm").noconvert().none() = nb::none(), arg("norm_eps") = 1e-6F,
             arg("norm") = "rms", arg("norm_after_rope") = false,
             arg("alibi").noconvert().none() = nb::none(), arg("is_causal") = true,
             arg("is_whole") = false, arg("group") = 0, arg("own_heads") = nb::none(),
             arg("sinks").noconvert().none() = nb::none(), arg("is_chunked") = false,
             arg("query_scales").noconvert().none() = nb::none(),
             arg("rope_sections").none() = nb::none(), arg("is_segmented") = false,
             arg("rope_interleaved") = false, nb::keep_alive<1, 10>(), nb::keep_alive<1, 25>())
        .def("latent_attention", &add_latent_attention, arg("dst"), arg("q"), arg("kv"),
             arg("nope"), arg("mixed"), arg("key_up"), arg("value_up"), arg("layer"),
             arg("num_heads"), arg("first_head"), arg("rank"), arg("scale"),
             arg("cos_sin").noconvert(), arg("turns_neighbours"), arg("kv_norm").noconvert(),
             arg("norm_eps"), arg("window"), arg("group"), nb::keep_alive<1, 7>(),
             nb::keep_alive<1, 8>(), nb::keep_alive<1, 14>())
        .def(
            "moe",
            [](Program& self, int dst, int src, int scores, int gathered, int hidden, int results,
               const std::vector<Packed*>& gate_up, const std::vector<Packed*>& down, int64_t top_k,
               bool renormalise, const std::string& activation, bool is_sigmoid, int64_t num_groups,
               int64_t top_groups, int64_t best_of_group, float scale,
               const std::optional<Floats>& routing_bias, const std::optional<Floats>& gate_up_bias,
               const std::optional<Floats>& down_bias, bool weighs_inputs, int64_t first_slot,
               std::optional<int64_t> num_slots, std::optional<int64_t> num_experts) {
                const int64_t all = num_slots.value_or(static_cast<int64_t>(gate_up.size()));
                self.moe({dst, src, scores, gathered, hidden, results},
                         {.gate_up = gate_up,
                          .down = down,
                          .first_slot = first_slot,
                          .num_slots = all,
                          .num_experts = num_experts.value_or(all),
                          .top_k = top_k,
                          .renormalise = renormalise,
                          .activation = parse_activation(activation),
                          .routing = {is_sigmoid, nullptr, num_groups, top_groups, best_of_group,
                                      scale, weighs_inputs},
                          .routing_bias = span_of(routing_bias),
                          .gate_up_bias = span_of(gate_up_bias),
                          .down_bias = span_of(down_bias)});
            },
            arg("dst"), arg("src"), arg("scores"), arg("gathered"), arg("hidden"), arg("results"),
            arg("gate_up"), arg("down"), arg("top_k"), arg("renormalise"), arg("activation"),
            arg("is_sigmoid") = false, arg("num_groups") = 1, arg("top_groups") = 1,
            arg("best_of_group") = 1, arg("scale") = 1.0F,
            arg("routing_bias").noconvert().none() = nb::none(),
            arg("gate_up_bias").noconvert().none() = nb::none(),
            arg("down_bias").noconvert().none() = nb::none(), arg("weighs_inputs") = false,
            arg("first_slot") = 0, arg("num_slots").none() = nb::none(),
            arg("num_experts").none() = nb::none(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>())
        .def("expert_tokens", &Program::expert_tokens)
        .def("slot_tokens", &Program::slot_tokens)
        .def("move_experts",
             nb::overload_cast<const std::vector<std::vector<int32_t>>&>(&Program::move_experts),
             arg("layouts"), nb::call_guard<nb::gil_scoped_release>())
        .def("run_empty", &Program::run_empty, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "glu",
            [](Program& self, int dst, int src, const std::string& activation) {
                self.glu(dst, src, parse_activation(activation));
            },
            arg("dst"), arg("src"), arg("activation"))
        .def(
            "activation",
            [](Program& self, int dst, int src, const std::string& activation) {
                self.activation(dst, src, parse_activation(activation));
            },
            arg("dst"), arg("src"), arg("activation"))
        .def("add", &Program::add, arg("dst"), arg("x"), arg("y"), arg("scale") = 1.0F)
        .def("scale", &Program::scale, arg("dst"), arg("src"), arg("factor"))
        .def("soft_cap", &Program::soft_cap, arg("dst"), arg("src"), arg("cap"))
        .def("clamp", &Program::clamp, arg("dst"), arg("src"), arg("limit"))
        .def("gate", &Program::gate, arg("dst"), arg("src"), arg("scores"))
        .def("convert", &Program::convert, arg("dst"), arg("src"))
        .def("select_rows", &Program::select_rows, arg("dst"), arg("src"))
        .def(
            "pool",
            [](Program& self, int dst, int src, const std::string& kind) {
                self.pool(dst, src, parse_pool_kind(kind));
            },
            arg("dst"), arg("src"), arg("kind"))
        .def("run", &run_step, arg("kv"), arg("token_ids").noconvert(),
             arg("positions").noconvert(), arg("slots").noconvert(), arg("seq_starts").noconvert(),
             arg("seq_lens").noconvert(), arg("rows").noconvert(), arg("block_tables").noconvert(),
             arg("logit_rows").noconvert(), arg("type_ids").noconvert().none() = nb::none(),
             arg("op_times").noconvert().none() = nb::none(),
             arg("adapters").noconvert().none() = nb::none(),
             arg("input_rows").noconvert().none() = nb::none(),
             arg("inputs").noconvert().none() = nb::none(),
             arg("seen_to").noconvert().none() = nb::none(),
             arg("rope_positions").noconvert().none() = nb::none(),
             arg("segment_starts").noconvert().none() = nb::none(),
             arg("states").none() = nb::none(), arg("state_slots").noconvert().none() = nb::none(),
             arg("state_saves").noconvert().none() = nb::none(), arg("cross").none() = nb::none(),
             arg("cross_slots").noconvert().none() = nb::none(),
             arg("features").noconvert().none() = nb::none(), arg("first_instruction") = 0,
             arg("end_instruction") = -1)
        .def_prop_ro("num_instructions", &Program::num_instructions)
        .def(
            "cross_attention",
            [](Program& self, int dst, int q, int64_t layer, int64_t num_heads, int64_t head_dim,
               int64_t length, float scale) {
                self.cross_attention(dst, q, {layer, num_heads, head_dim, length, scale});
            },
            arg("dst"), arg("q"), arg("layer"), arg("num_heads"), arg("head_dim"), arg("length"),
            arg("scale"))
        .def(
            "store_cross",
            [](Program& self, int src, int64_t layer, int64_t num_heads, int64_t head_dim,
               int64_t length) {
                self.store_cross(src, {layer, num_heads, head_dim, length, 1.0F});
            },
            arg("src"), arg("layer"), arg("num_heads"), arg("head_dim"), arg("length"))
        .def("features", &Program::features, arg("dst"))
        .def("shift_rows", &Program::shift_rows, arg("dst"), arg("src"))
        .def("read", &read_buffer, arg("buffer"), arg("num_rows"));
}

}  // namespace octavo
