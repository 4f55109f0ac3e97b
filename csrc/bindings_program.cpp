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
    constexpr std::array<std::pair<const char*, cpu::Activation>, 7> known{{{"", None},
                                                                            {"silu", Silu},
                                                                            {"gelu", Gelu},
                                                                            {"gelu_tanh", GeluTanh},
                                                                            {"relu", Relu},
                                                                            {"relu2", Relu2},
                                                                            {"tanh", Tanh}}};
    for (const auto& [known_name, activation] : known) {
        if (name == known_name) {
            return activation;
        }
    }
    fail("activation '", name, "' is not known; there are: silu, gelu, gelu_tanh, relu, relu2, ",
         "tanh");
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

void check_page(const char* what, size_t size, const KVCache& kv) {
    check(static_cast<int64_t>(size) == kv.bytes_per_block(), what, ": a page of ", size,
          " bytes; it must have ", kv.bytes_per_block());
}

void save_block(const KVCache& kv, int64_t block, const Page& page) {
    check_page("save", page.size(), kv);
    kv.save(block, reinterpret_cast<std::byte*>(page.data()));
}

void load_block(KVCache& kv, int64_t block, const ReadOnlyPage& page) {
    check_page("load", page.size(), kv);
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
               std::vector<int64_t> windows, const std::string& dtype) {
                std::vector<KVPart> parts;
                for (const auto& [group, region, num_kv_heads, head_dim] : layers) {
                    parts.push_back({group, region, num_kv_heads, head_dim});
                }
                new (self) KVCache(num_blocks, std::move(parts), std::move(windows),
                                   parse_kv_format(dtype));
            },
            arg("num_blocks"), arg("layers"), arg("windows"), arg("dtype"))
        .def_prop_ro("bytes_per_block", &KVCache::bytes_per_block)
        .def("copy", &copy_blocks, arg("copies").noconvert())
        .def("poison", &poison_blocks, arg("block_ids"))
        .def("save", &save_block, arg("block"), arg("page").noconvert())
        .def("load", &load_block, arg("block"), arg("page").noconvert())
        .def("read", &read_block, arg("layer"), arg("block"));
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
    int64_t group, const std::optional<std::array<int64_t, 4>>& own_heads) {
    check(!cos_sin || static_cast<int64_t>(cos_sin->shape(1)) == rotary_dim,
          "attention: cos_sin has ", cos_sin ? cos_sin->shape(1) : 0, " columns; rotary_dim is ",
          rotary_dim);
    const auto [first_head, own_count, first_kv_head, own_kv_count] =
        own_heads.value_or(std::array<int64_t, 4>{0, num_heads, 0, num_kv_heads});
    program.attention(dst, qkv,
                      {.layer = layer,
                       .shape = {own_count, own_kv_count, head_dim, window, is_causal, group},
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
                       .is_whole = is_whole});
}

using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

FloatMatrix matrix_of(const FloatTable& table) {
    return {table.data(), static_cast<int64_t>(table.shape(0)),
            static_cast<int64_t>(table.shape(1))};
}

void add_to_adapter(PackedAdapter& adapter, const AdapterSlots& slots, int64_t site,
                    const std::vector<int64_t>& parts, const std::vector<FloatTable>& downs,
                    const std::vector<FloatTable>& ups, const std::vector<float>& scales) {
    check(
        downs.size() == parts.size() && ups.size() == parts.size() && scales.size() == parts.size(),
        "add: parts, downs, ups and scales differ in number");
    std::vector<AdapterPart> all;
    for (size_t i = 0; i < parts.size(); ++i) {
        all.push_back({parts[i], matrix_of(downs[i]), matrix_of(ups[i]), scales[i]});
    }
    const nb::gil_scoped_release release;
    adapter.add(slots, site, all);
}

void bind_adapters(nb::module_& module) {
    nb::class_<PackedAdapter>(module, "PackedAdapter")
        .def(nb::init<const AdapterSlots&>(), arg("slots"))
        .def("add", &add_to_adapter, arg("slots"), arg("site"), arg("parts"), arg("downs"),
             arg("ups"), arg("scales"))
        .def_prop_ro("nbytes", &PackedAdapter::num_bytes);
    nb::class_<AdapterSlots>(module, "AdapterSlots")
        .def(
            "__init__",
            [](AdapterSlots* self, int64_t num_slots, int64_t max_rank, const std::string& dtype) {
                new (self) AdapterSlots(num_slots, max_rank, parse_dtype(dtype));
            },
            arg("num_slots"), arg("max_rank"), arg("dtype"))
        .def("add_site", &AdapterSlots::add_site, arg("sizes"), arg("cols"))
        .def("shrunken_cols", &AdapterSlots::shrunken_cols, arg("site"))
        .def("set", &AdapterSlots::set, arg("slot"), arg("adapter").none());
}

using Times = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void run_step(Program& program, const KVCache& kv, const Ints& token_ids, const Ints& positions,
              const IntTable& slots, const Ints& seq_starts, const Ints& seq_lens, const Ints& rows,
              const IntTables& block_tables, const Ints& logit_rows,
              const std::optional<Ints>& type_ids, const std::optional<Times>& op_times,
              const std::optional<Ints>& adapters) {
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
        .op_times = op_times ? std::span<int64_t>(op_times->data(), op_times->size())
                             : std::span<int64_t>(),
    };
    const nb::gil_scoped_release release;
    program.run(kv, step);
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
    nb::class_<Program>(module, "Program", nb::is_weak_referenceable())
        .def(nb::init<Team&, int64_t, int64_t, int64_t, int, Ranks*>(), arg("team"),
             arg("arena_bytes"), arg("max_tokens"), arg("max_logit_rows"),
             arg("activation_bits") = 16, arg("ranks").none() = nb::none(), nb::keep_alive<1, 2>(),
             nb::keep_alive<1, 7>())
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
             nb::keep_alive<1, 10>())
        .def(
            "moe",
            [](Program& self, int dst, int src, int scores, int gathered, int hidden, int results,
               const std::vector<const Packed*>& gate_up, const std::vector<const Packed*>& down,
               int64_t top_k, bool renormalise, const std::string& activation) {
                self.moe({dst, src, scores, gathered, hidden, results},
                         {gate_up, down, top_k, renormalise, parse_activation(activation)});
            },
            arg("dst"), arg("src"), arg("scores"), arg("gathered"), arg("hidden"), arg("results"),
            arg("gate_up"), arg("down"), arg("top_k"), arg("renormalise"), arg("activation"),
            nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>())
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
             arg("adapters").noconvert().none() = nb::none())
        .def("read", &read_buffer, arg("buffer"), arg("num_rows"));
}

}  // namespace octavo
