// Compares the kernel sets that can run here with the generic one, bit by bit, without Python: for
// processors that are emulated as a whole. The rest of what is promised, tests/kernels asks.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "common/half.h"
#include "cpu/groups.h"
#include "cpu/isa.h"

namespace octavo::cpu {
namespace {

using Bytes = std::vector<std::byte>;
using Run = std::function<Bytes(const Kernels&)>;

// As a worker has it: at the start of a cache line.
class Scratch {
  public:
    explicit Scratch(int64_t num_bytes) : lines_(static_cast<size_t>(num_bytes / 64 + 1)) {}
    std::byte* data() const { return const_cast<std::byte*>(lines_.data()->bytes); }

  private:
    struct alignas(64) Line {
        std::byte bytes[64];
    };
    std::vector<Line> lines_;
};

std::mt19937 rng(1);

std::vector<float> random_floats(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
        value = normal(rng);
    }
    return values;
}

Bytes bytes_of(const std::vector<float>& values, Dtype dtype) {
    Bytes bytes(values.size() * static_cast<size_t>(size_of(dtype)));
    for (size_t i = 0; i < values.size(); ++i) {
        const uint16_t rounded = float_to_bf16(values[i]);
        dtype == Dtype::F32 ? std::memcpy(bytes.data() + i * 4, &values[i], 4)
                            : std::memcpy(bytes.data() + i * 2, &rounded, 2);
    }
    return bytes;
}

uint8_t random_below(uint32_t limit) { return static_cast<uint8_t>(rng() % limit); }

// Numbers lie in an order that does not matter here; integers have small scales that every format
// has room for.
Bytes random_panels(const Panels& shape) {
    const Format& format = format_of(shape.packing());
    const int64_t size = shape.count() * shape.panel_bytes(shape.packing());
    if (!format.is_integer()) {
        const Dtype dtype = shape.packing() == Packing::F32 ? Dtype::F32 : Dtype::BF16;
        return bytes_of(random_floats(size / size_of(dtype)), dtype);
    }
    Bytes bytes(static_cast<size_t>(size));
    const int64_t blocks = shape.groups() / format.block_groups();
    for (int64_t at = 0; at < shape.count() * blocks; ++at) {
        std::byte* panel = bytes.data() + at / blocks * shape.panel_bytes(shape.packing());
        for (int64_t lane = 0; lane < kPanelRows; ++lane) {
            IntegerBlock row;
            std::generate(std::begin(row.codes), std::end(row.codes),
                          [&] { return random_below(1U << format.bits); });
            std::generate(std::begin(row.scales), std::end(row.scales),
                          [&] { return static_cast<int8_t>(random_below(16)); });
            std::generate(std::begin(row.minima), std::end(row.minima),
                          [&] { return random_below(16); });
            row.scale = format.scales == Scales::Power ? uint16_t(112 + random_below(32))
                                                       : float_to_half(random_floats(1)[0]);
            row.minimum = float_to_half(random_floats(1)[0]);
            row.factor = 0.01F;
            put(format, panel, at % blocks, lane, row);
        }
    }
    return bytes;
}

int compare(const std::string& what, const Run& run) {
    int num_different = 0;
    const Bytes expected = run(select_kernels("generic"));
    for (const Kernels* kernels : available_kernels()) {
        if (run(*kernels) != expected) {
            std::printf("%s: %s differs from generic\n", what.c_str(), kernels->isa);
            num_different += 1;
        }
    }
    return num_different;
}

Bytes run_linear(const Kernels& kernels, LinearArgs args) {
    Bytes y(static_cast<size_t>(args.num_rows * args.dst.cols * 4));
    const Scratch scratch(kernels.linear_scratch_bytes(args.weight));
    args.dst.data = y.data();
    kernels.linear(args, 0, args.units(), scratch.data());
    return y;
}

// These sets multiply pairs of bf16, in an order of their own.
bool has_own_order(const Kernels& kernels) {
    const std::string isa = kernels.isa;
    return isa == "avx512bf16" || isa == "amx";
}

float largest_difference(const Bytes& left, const Bytes& right) {
    float largest = 0.0F;
    for (size_t i = 0; i < right.size(); i += 4) {
        float a = 0;
        float b = 0;
        std::memcpy(&a, left.data() + i, 4);
        std::memcpy(&b, right.data() + i, 4);
        largest = std::max(largest, std::fabs(a - b) / (1.0F + std::fabs(b)));
    }
    return largest;
}

// As compare(), but sets with an order of their own need only be near.
int compare_nearly(const std::string& what, const Run& run, float tolerance) {
    int num_different = 0;
    const Bytes expected = run(select_kernels("generic"));
    for (const Kernels* kernels : available_kernels()) {
        const Bytes got = run(*kernels);
        const float off = largest_difference(got, expected);
        if (has_own_order(*kernels) ? !(off < tolerance) : got != expected) {
            std::printf("%s: %s is off by %g\n", what.c_str(), kernels->isa,
                        static_cast<double>(off));
            num_different += 1;
        }
    }
    return num_different;
}

// Near the generic set's, and for a row the same in any company.
int check_own_order(const std::string& what, const Kernels& kernels, const LinearArgs& args) {
    const Bytes together = run_linear(kernels, args);
    Bytes alone;
    for (int64_t row = 0; row < args.num_rows; ++row) {
        LinearArgs one = args;
        one.src.data = args.src.row(row);
        one.num_rows = 1;
        const Bytes y = run_linear(kernels, one);
        alone.insert(alone.end(), y.begin(), y.end());
    }
    const Bytes expected = run_linear(select_kernels("generic"), args);
    const float largest = largest_difference(together, expected);
    if (together != alone || !(largest < 1e-4F)) {
        std::printf("%s: %s is off by %g%s\n", what.c_str(), kernels.isa,
                    static_cast<double>(largest),
                    together == alone ? "" : ", and rows depend on their company");
        return 1;
    }
    return 0;
}

int compare_linear(Packing packing, int activation_bits, LinearMode mode, int64_t num_rows,
                   int64_t cols) {
    const Dtype dtype = packing == Packing::BF16 ? Dtype::BF16 : Dtype::F32;
    const int64_t whole = format_of(packing).has_small() ? format_of(packing).block_columns() : 1;
    cols = (cols + whole - 1) / whole * whole;
    Panels weight{.rows = 96, .cols = cols};
    weight.runs[0].packing = packing;
    const Bytes panels = random_panels(weight);
    weight.data = panels.data();
    Bytes x = bytes_of(random_floats(num_rows * cols), dtype);
    const std::vector<float> bias = random_floats(96);
    LinearArgs args;
    args.src = {x.data(), cols, dtype};
    args.dst = {nullptr, mode == LinearMode::Glu ? 48 : 96, Dtype::F32};
    args.num_rows = num_rows;
    args.weight = weight;
    args.bias = bias.data();
    args.mode = mode;
    args.activation_bits = activation_bits;
    args.activation = mode == LinearMode::Glu ? Activation::GeluTanh : Activation::None;
    const std::string what = "linear, packing " + std::to_string(static_cast<int>(packing)) +
                             ", activations of " + std::to_string(activation_bits) + ", mode " +
                             std::to_string(static_cast<int>(mode)) + ", " +
                             std::to_string(num_rows) + " x " + std::to_string(cols);
    if (packing != Packing::BF16) {
        return compare(what, [&](const Kernels& kernels) { return run_linear(kernels, args); });
    }
    int num_different = 0;
    for (const Kernels* kernels : available_kernels()) {
        if (has_own_order(*kernels)) {
            num_different += check_own_order(what, *kernels, args);
        } else if (run_linear(*kernels, args) != run_linear(select_kernels("generic"), args)) {
            std::printf("%s: %s differs from generic\n", what.c_str(), kernels->isa);
            num_different += 1;
        }
    }
    return num_different;
}

int compare_activation(Activation activation, Dtype dtype) {
    std::vector<float> values = random_floats(7 * 53);
    for (size_t i = 0; i < values.size(); i += 3) {
        values[i] *= 40.0F;
    }
    values[5] = INFINITY;
    values[6] = -0.0F;
    values[8] = 1e-40F;
    Bytes x = bytes_of(values, Dtype::F32);
    return compare("activation " + std::to_string(static_cast<int>(activation)),
                   [&](const Kernels& kernels) {
                       Bytes y(static_cast<size_t>(7 * 53 * size_of(dtype)));
                       RowOpArgs args;
                       args.op = RowOp::Activation;
                       args.src = {x.data(), 53, Dtype::F32};
                       args.dst = {y.data(), 53, dtype};
                       args.activation = activation;
                       kernels.row_op(args, 0, 7);
                       return y;
                   });
}

int compare_norm(bool is_layer_norm, int64_t cols) {
    Bytes x = bytes_of(random_floats(5 * cols), Dtype::F32);
    const std::vector<float> weight = random_floats(cols + 16);
    return compare(is_layer_norm ? "layer_norm" : "rms_norm", [&](const Kernels& kernels) {
        Bytes y(static_cast<size_t>(5 * cols * 4));
        NormArgs args;
        args.src = {x.data(), cols, Dtype::F32};
        args.dst = {y.data(), cols, Dtype::F32};
        args.weight = weight.data();
        args.eps = 1e-5F;
        (is_layer_norm ? kernels.layer_norm : kernels.rms_norm)(args, 0, 5);
        return y;
    });
}

Bytes random_cache(KVLayer kv, int64_t num_blocks) {
    kv.stride = kv.block_bytes();
    const int64_t size = num_blocks * kv.stride;
    if (!kv.is_scaled()) {
        const Dtype dtype = kv.format == KVFormat::F32 ? Dtype::F32 : Dtype::BF16;
        return bytes_of(random_floats(size / size_of(dtype)), dtype);
    }
    Bytes bytes(static_cast<size_t>(size));
    std::generate(bytes.begin(), bytes.end(), [] { return std::byte{random_below(120)}; });
    kv.data = bytes.data();
    for (int64_t i = 0; i < num_blocks * kv.num_kv_heads; ++i) {
        uint16_t* scales = kv.key_scales(i / kv.num_kv_heads, i % kv.num_kv_heads);
        std::generate_n(scales, 2 * kBlockTokens,
                        [] { return float_to_bf16(random_floats(1)[0] / 64); });
    }
    return bytes;
}

// One sequence of 70 tokens; `window` hides the first ones.
int compare_attention(KVFormat format, int64_t window) {
    constexpr int64_t kTokens = 70, kHeads = 4, kKVHeads = 2, kDim = 32;
    const std::vector<float> q = random_floats(kTokens * kHeads * kDim);
    const Bytes cache = random_cache({nullptr, kKVHeads, kDim, format}, 5);
    const int32_t blocks[] = {3, 0, 4, 1, 2};
    const Run run = [&](const Kernels& kernels) {
        Bytes kv = cache;
        std::vector<float> queries = q;
        Bytes y(static_cast<size_t>(kTokens * kHeads * kDim * 4));
        AttentionArgs args;
        args.dst = {y.data(), kHeads * kDim, Dtype::F32};
        args.q = queries.data();
        args.kv = {kv.data(), kKVHeads, kDim, format};
        args.kv.stride = args.kv.block_bytes();
        args.num_heads = kHeads;
        args.window = window;
        args.scale = 0.2F;
        args.soft_cap = 20.0F;
        const Scratch scratch(kernels.attend_scratch_bytes(args.group(), kDim, 0));
        const int64_t step = query_tile_tokens(args.group());
        for (int32_t head = 0; head < kKVHeads; ++head) {
            for (int64_t first = 0; first < kTokens; first += step) {
                QueryTile tile{};
                tile.block_table = blocks;
                tile.first_token = static_cast<int32_t>(first);
                tile.num_tokens = static_cast<int32_t>(std::min(step, kTokens - first));
                tile.first_position = tile.first_token;
                tile.end_position = kTokens;
                tile.kv_head = head;
                tile.end_partition = 1;
                kernels.attend(args, tile, 0, {}, scratch.data());
            }
        }
        return y;
    };
    return format == KVFormat::BF16 ? compare_nearly("attention", run, 2e-2F)
                                    : compare("attention", run);
}

int compare_logits(int64_t count) {
    const std::vector<float> x = random_floats(count);
    return compare("weights", [&](const Kernels& kernels) {
        const auto blocks = static_cast<size_t>((count + kLogitBlock - 1) / kLogitBlock);
        std::vector<float> maxima(blocks);
        std::vector<uint64_t> weights(blocks + 1);
        const RowScan scan = kernels.scan_row(x.data(), count, maxima.data());
        weights[blocks] =
            kernels.sum_softmax_weights(x.data(), count, scan.max, 0.7F, weights.data());
        Bytes result(blocks * 4 + weights.size() * 8);
        std::memcpy(result.data(), maxima.data(), blocks * 4);
        std::memcpy(result.data() + blocks * 4, weights.data(), weights.size() * 8);
        return result;
    });
}

int compare_quantising(Packing packing) {
    const std::vector<float> values = random_floats(kGroupColumns);
    return compare("quantize_group", [&](const Kernels& kernels) {
        const IntegerBlock row = kernels.quantize_group(packing, values.data());
        Bytes block(static_cast<size_t>(format_of(packing).block_bytes()));
        put(format_of(packing), block.data(), 0, 0, row);
        return block;
    });
}

int compare_all() {
    int num_different = 0;
    for (int index = 0; index < kNumPackings; ++index) {
        const auto packing = static_cast<Packing>(index);
        for (const LinearMode mode : {LinearMode::Store, LinearMode::Add, LinearMode::Glu}) {
            for (const auto& [rows, cols] :
                 {std::pair<int64_t, int64_t>{1, 64}, {2, 33}, {7, 130}, {37, 96}, {100, 70}}) {
                num_different += compare_linear(packing, 16, mode, rows, cols);
                if (format_of(packing).is_integer()) {
                    num_different += compare_linear(packing, 8, mode, rows, cols);
                }
            }
        }
    }
    for (const Activation activation : {Activation::Silu, Activation::Gelu, Activation::GeluTanh,
                                        Activation::Relu, Activation::Tanh, Activation::None}) {
        num_different += compare_activation(activation, Dtype::F32);
        num_different += compare_activation(activation, Dtype::BF16);
    }
    for (const int64_t cols : {16, 48, 77}) {
        num_different += compare_norm(false, cols) + compare_norm(true, cols);
    }
    for (const KVFormat format :
         {KVFormat::F32, KVFormat::BF16, KVFormat::Int8, KVFormat::E4M3, KVFormat::E5M2}) {
        num_different += compare_attention(format, 0) + compare_attention(format, 20);
    }
    for (const int64_t count : {1, 64, 1000}) {
        num_different += compare_logits(count);
    }
    return num_different + compare_quantising(Packing::Q8) + compare_quantising(Packing::Q4);
}

}  // namespace
}  // namespace octavo::cpu

int main() {
    std::printf("sets:");
    for (const octavo::cpu::Kernels* kernels : octavo::cpu::available_kernels()) {
        std::printf(" %s", kernels->isa);
    }
    const int num_different = octavo::cpu::compare_all();
    std::printf("\n%d differences\n", num_different);
    return num_different == 0 ? 0 : 1;
}
