// What every instruction set provides: parameter structs and one table of functions.
//
// Sizes and shapes are checked before (program.cpp); kernels trust them, never allocate, never
// throw. `begin, end` say which share of the work to do. How the work is shared never changes a bit
// of it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "cpu/formats.h"
#include "cpu/kv_layer.h"

namespace octavo::cpu {

// SwigluClamped is of two halves only: both within ±7, the gate's sigmoid of 1.702 times it, and
// one added to the other half.
enum class Activation : uint8_t {
    None,
    Silu,
    Gelu,
    GeluTanh,
    Relu,
    Relu2,
    Tanh,
    Sigmoid,
    SwigluClamped
};

// Rows of a buffer lie one behind the other: a matrix [rows, cols]; or some columns of such.
struct Matrix {
    std::byte* data = nullptr;
    int64_t cols = 0;
    Dtype dtype = Dtype::F32;
    int64_t stride = 0;  // columns from one row to the next; 0: cols

    std::byte* row(int64_t index) const {
        return data + index * (stride == 0 ? cols : stride) * size_of(dtype);
    }
    Matrix columns(int64_t first, int64_t count) const {
        return {data + first * size_of(dtype), count, dtype, stride == 0 ? cols : stride};
    }
};

// A panel of weights: 16 rows, or two such halves of a gated layer.
struct Panel {
    const std::byte* data;
    Packing packing;
};

// Neighbouring panels that are packed alike.
struct PanelRun {
    int64_t first_panel = 0;
    int64_t offset = 0;  // of its bytes
    Packing packing = Packing::F32;
};

constexpr int kMaxRuns = 4;

// Weights in panels of 16 rows; see packed.h. Matrices that were stored in different forms and are
// computed as one make runs of panels, all of them integers.
struct Panels {
    const std::byte* data = nullptr;
    int64_t rows = 0;
    int64_t cols = 0;
    std::array<PanelRun, kMaxRuns> runs = {};
    int num_runs = 1;

    int64_t count() const { return (rows + kPanelRows - 1) / kPanelRows; }
    int64_t pairs() const { return (cols + 1) / 2; }
    int64_t groups() const { return (cols + kGroupColumns - 1) / kGroupColumns; }
    Packing packing() const { return runs[0].packing; }
    bool is_quantized() const { return format_of(packing()).is_integer(); }
    int64_t panel_bytes(Packing packing) const {
        const Format& format = format_of(packing);
        return format.is_integer() ? format.factors_bytes() +
                                         groups() / format.block_groups() * format.block_bytes()
                                   : pairs() * 2 * kPanelRows * (packing == Packing::F32 ? 4 : 2);
    }
    Panel panel(int64_t index) const {
        int run = num_runs - 1;
        while (runs[static_cast<size_t>(run)].first_panel > index) {
            --run;
        }
        const PanelRun& of = runs[static_cast<size_t>(run)];
        return {data + of.offset + (index - of.first_panel) * panel_bytes(of.packing), of.packing};
    }
};

constexpr int64_t kMaxAdapterRank = 256;

// What an adapter adds to neighbouring panels of a linear layer's outputs: of `pairs` pairs of
// shrunken values from `first` on, weights as a panel has them.
struct AdapterRun {
    int64_t end;     // the panel behind the last
    int64_t offset;  // of the bytes of panel 0, were it one of them
    int32_t first;
    int32_t pairs;  // 0: it adds nothing
};

// An adapter's share in one linear layer: first panels of 16 ranks over the layer's columns, then
// panels of 16 outputs over ranks.
struct AdapterWeights {
    Dtype dtype;
    int64_t num_ranks;  // of all parts, padded to whole panels
    int64_t down_panel_bytes;
    const std::byte* data;
    const AdapterRun* runs;  // all panels of the layer
    const float* scales;     // one for each rank
};

// u = scale * down · src, for rows whose slot has an adapter.
struct ShrinkArgs {
    Matrix src = {};
    Matrix u = {};
    Dtype dtype = Dtype::BF16;                        // of the adapters
    const int32_t* rows = nullptr;                    // which rows, those of a slot side by side
    const int32_t* slots = nullptr;                   // of each row of src
    const AdapterWeights* const* adapters = nullptr;  // by slot; null: nothing for this layer
};

enum class LinearMode : uint8_t { Store, Add, Glu };

struct LinearArgs {
    Matrix dst = {};
    Matrix src = {};
    int64_t num_rows = 0;
    Panels weight = {};
    const float* bias = nullptr;  // padded to whole panels, or null
    LinearMode mode = LinearMode::Store;
    Activation activation = Activation::None;  // of Glu's left half, or of what Store writes
    float scale = 1.0F;
    int64_t first_column = 0;  // of dst, where the weight has only some of the layer's outputs
    int activation_bits = 16;  // 8 or 16: what rows are rounded to where weights are integers
    const std::byte* quantized = nullptr;  // the rows as quantize_rows leaves them, if it did
    bool in_tiles = false;  // 16 rows side by side there, where the instruction set wants them so
    const int32_t* slots = nullptr;  // of each row's adapter, -1: none; null: no row has one
    const AdapterWeights* const* adapters = nullptr;  // by slot
    Matrix u = {};                                    // what shrink left

    // Work is shared out in panels; for Glu in pairs of panels, one of each half.
    int64_t units() const { return mode == LinearMode::Glu ? weight.count() / 2 : weight.count(); }
};

struct NormArgs {
    Matrix dst = {};
    Matrix src = {};
    const float* weight = nullptr;
    float eps = 0.0F;
    const float* add = nullptr;  // null, or [rows, cols] to add to src first, in place
    float add_scale = 1.0F;
    const float* bias = nullptr;  // layer_norm only; null: none
};

enum class RowOp : uint8_t {
    Convert,
    Select,
    Add,
    Scale,
    SoftCap,
    Clamp,
    Activation,
    Glu,
    Columns,
    Multiply
};

struct RowOpArgs {
    RowOp op = RowOp::Convert;
    Matrix dst = {};
    Matrix src = {};
    Matrix other = {};  // Add; Multiply: by activation(other)
    int64_t first = 0;  // Columns: of src
    Activation activation = Activation::None;
    float factor = 1.0F;  // Add, Scale; the cap of SoftCap, the limit of Clamp
    // Select: which row of src becomes row i of dst; -1: zeros do.
    const int32_t* rows = nullptr;
    const float* factors = nullptr;  // Select: of each row of dst; null: 1
};

// What a table is looked up by.
enum class EmbedOf : uint8_t { Tokens, Positions, Types };

struct EmbedArgs {
    Matrix dst = {};
    Panels table = {};
    const int32_t* ids = nullptr;  // null: all zero
    float scale = 1.0F;
    EmbedOf of = EmbedOf::Tokens;
    int64_t offset = 0;  // added to each id
};

// One row from all rows of a sequence.
enum class PoolKind : uint8_t { Mean, Max, MeanSqrtLength, WeightedMean };

struct PoolArgs {
    Matrix dst = {};  // a row for each sequence
    Matrix src = {};  // a row for each token
    PoolKind kind = PoolKind::Mean;
    const int32_t* seq_starts = nullptr;
};

// All heads of a layer, and the first ones that this process computes.
struct HeadRange {
    int64_t num_heads = 0;  // in a row of qkv, and of dst
    int64_t num_kv_heads = 0;
    int64_t first_head = 0;
    int64_t first_kv_head = 0;
};

// The first position that a token sees. A window of 0 shows it everything.
inline int64_t first_seen(int64_t position, int64_t window, bool is_chunked) {
    if (window == 0) {
        return 0;
    }
    return is_chunked ? position / window * window : std::max<int64_t>(0, position + 1 - window);
}

// Of a head's columns by themselves, or of all heads' columns together.
enum class HeadNorm : uint8_t { Rms, Layer, Row };

constexpr int64_t kRopeAxes = 3;  // a picture's tokens stand in time, in a line and in a column

struct AttentionArgs {
    Matrix dst = {};
    Matrix qkv = {};
    float* q = nullptr;  // [tokens, num_heads * head_dim]: normed and rotated
    KVLayer kv = {};
    int64_t num_heads = 0;  // that this process computes, as many as kv has of their KV heads
    HeadRange heads = {};   // where those are among all of them
    int64_t rotary_dim = 0;
    int64_t window = 0;              // 0: everything before
    bool is_chunked = false;         // the window begins where chunks of that length do
    const float* cos_sin = nullptr;  // [positions, rotary_dim]
    // How many pairs of columns turn by each axis of `rope_positions`; all 0: by `positions`.
    std::array<int64_t, kRopeAxes> rope_sections = {};
    // Pairs of the axes lie in turn, not behind each other; what no other one has is the first's.
    bool rope_interleaved = false;
    const int32_t* rope_positions = nullptr;  // [3, num_tokens], or null: all are `positions`
    int64_t num_tokens = 0;
    const float* q_norm = nullptr;  // [head_dim], or [heads * head_dim], or null
    const float* k_norm = nullptr;
    const float* alibi = nullptr;  // [num_heads]: what a score gains for each position of distance
    const float* query_scales = nullptr;  // [positions]: what queries are multiplied by; or null
    const int32_t* positions = nullptr;
    const int32_t* slots = nullptr;
    // Of a causal layer's tokens: behind the last one that each sees, 0: behind itself; or null.
    const int32_t* seen_to = nullptr;
    float scale = 1.0F;
    float soft_cap = 0.0F;  // 0: none
    float norm_eps = 0.0F;
    HeadNorm norm = HeadNorm::Rms;
    bool norm_after_rope = false;
    bool norm_by_head = false;      // each head has weights of its own
    bool is_causal = true;          // else a token sees later ones too, as far as its window
    bool has_queries_only = false;  // a row of qkv has no k and v: others wrote them

    int64_t group() const { return num_heads / kv.num_kv_heads; }
    const float* sinks = nullptr;  // [num_heads]: a score more in the softmax, of no value
    // Work of prepare_heads: each q head and each KV head of each token.
    int64_t head_units() const { return num_heads + (has_queries_only ? 0 : kv.num_kv_heads); }
};

// What a token brings to a latent layer: its queries, each [what meets latents | what turns], and
// [its latent vector | its key that turns].
struct LatentArgs {
    Matrix q = {};
    Matrix kv = {};
    Matrix nope = {};  // the queries' first parts by themselves, as the products take them
    int64_t rope_dim = 0;
    bool turns_neighbours = false;   // rope's pairs are (2 i, 2 i + 1)
    const float* kv_norm = nullptr;  // [rank], of the latent vector

    int64_t nope_dim(int64_t num_heads) const { return nope.cols / num_heads; }
};

// The softmax of some rows so far.
struct SoftmaxState {
    float* values = nullptr;  // [rows, head_dim], weighted by exp(score - maximum)
    float* maximum = nullptr;
    float* sum = nullptr;  // 0: the row has seen nothing

    SoftmaxState() = default;
    SoftmaxState(float* memory, int64_t num_rows, int64_t head_dim)
        : values(memory), maximum(memory + num_rows * head_dim), sum(maximum + num_rows) {}

    // Of the rows from `first` on.
    SoftmaxState rows_from(int64_t first, int64_t head_dim) const {
        SoftmaxState rows = *this;
        rows.values += first * head_dim;
        rows.maximum += first;
        rows.sum += first;
        return rows;
    }
};

// Some tokens, for all heads that share a KV head: neighbours of one sequence, or, against one
// partition, tokens of several sequences that hold it in common and see all of it.
struct QueryTile {
    const int32_t* block_table;
    const int32_t* tokens;  // of the step; null: num_tokens from first_token on
    int32_t first_token;
    int32_t num_tokens;
    int32_t first_position;
    int32_t begin_position;  // of what its tokens can see: 0, or where their segment begins
    int32_t end_position;    // the sequence's length, or where their segment ends
    int32_t kv_head;
    int32_t first_partition;  // of the context, those that any row of the tile may see
    int32_t end_partition;
    const SoftmaxState* states;  // null, or of each partition, to be merged later

    bool is_shared() const { return tokens != nullptr; }
};

// A row's softmax is made in two levels, at absolute positions, so that its bits do not depend on
// how a context was chunked or shared out: online over the tiles of a partition, then over the
// partitions.
constexpr int64_t kPartitionTokens = 512;
constexpr int64_t kSoftmaxTokens = 128;

constexpr int64_t kTileRowsWanted = 48;  // rows of a query tile, a token's heads side by side

constexpr int64_t query_tile_tokens(int64_t group) {
    return group >= kTileRowsWanted ? 1 : kTileRowsWanted / group;
}
constexpr int64_t query_tile_rows(int64_t group) { return group * query_tile_tokens(group); }

// Floats of the softmax state of some rows: weighted values, maximum, sum.
constexpr int64_t state_floats(int64_t num_rows, int64_t head_dim) {
    return num_rows * (head_dim + 2);
}

struct AttendItem {
    int32_t tile;
    int32_t partition;  // of a tile with states; else all of them
};

// The blocks that a worker reads first in what it does next, to be fetched meanwhile; none: not
// known.
struct NextKeys {
    const int32_t* blocks = nullptr;
    int64_t num_blocks = 0;
    int64_t kv_head = 0;
};

// Where a layer's recurrent states are: of each sequence in the slot where it is read and left, and
// behind some tokens in another slot too.
struct StateArgs {
    float* data = nullptr;  // of slot 0
    int64_t stride = 0;     // floats from slot to slot
    const int32_t* slots = nullptr;
    const int32_t* saves = nullptr;  // of each token, -1: none; null: no token has one
    const int32_t* seq_starts = nullptr;
    const int32_t* seq_lens = nullptr;

    float* at(int32_t slot) const { return data + slot * stride; }
    // The sequence begins in this step.
    bool is_new(int64_t seq) const {
        return seq_lens[seq] == seq_starts[seq + 1] - seq_starts[seq];
    }
};

constexpr int64_t kMaxConvKernel = 16;
constexpr int64_t kConvChannels = 64;  // that a worker takes at a time
constexpr int64_t kMaxKeyDim = 512;

// dst = activation(bias + a weighted sum of a channel's last inputs). The state is the last
// kernel - 1 of them.
struct ConvArgs {
    Matrix dst = {};
    Matrix src = {};
    const float* weight = nullptr;  // [kernel, channels]
    const float* bias = nullptr;    // null: none
    int64_t kernel = 0;
    Activation activation = Activation::None;
    StateArgs state = {};

    int64_t units() const { return (dst.cols + kConvChannels - 1) / kConvChannels; }
};

// Mamba 2: rows of xbc are [heads * head_dim | groups * state_size of B | the same of C]; the state
// is [heads, state_size, head_dim].
struct SsdArgs {
    Matrix dst = {};
    Matrix xbc = {};
    Matrix dt = {};  // a column for each head
    int64_t heads = 0;
    int64_t head_dim = 0;
    int64_t groups = 0;
    int64_t state_size = 0;
    const float* a = nullptr;  // below zero
    const float* d = nullptr;
    const float* dt_bias = nullptr;
    float dt_min = 0.0F;
    float dt_max = 0.0F;
    int64_t state_offset = 0;
    StateArgs state = {};

    int64_t units() const { return heads; }
};

// Gated delta net: rows of qkv are [key_heads * key_dim of q | the same of k | value_heads *
// value_dim], those of gates [value_heads of beta | the same of dt]; the state is [value_heads,
// key_dim, value_dim].
struct DeltaArgs {
    Matrix dst = {};
    Matrix qkv = {};
    Matrix gates = {};
    int64_t key_heads = 0;
    int64_t value_heads = 0;
    int64_t key_dim = 0;
    int64_t value_dim = 0;
    const float* a = nullptr;  // below zero
    const float* dt_bias = nullptr;
    int64_t state_offset = 0;
    StateArgs state = {};

    int64_t units() const { return value_heads; }
};

// Mamba 1: each column has a state of its own; the state is [state_size, columns].
struct SelectiveArgs {
    Matrix dst = {};
    Matrix x = {};
    Matrix dt = {};
    Matrix b = {};  // state_size columns, as c
    Matrix c = {};
    int64_t state_size = 0;
    const float* a = nullptr;  // [state_size, columns], below zero
    const float* d = nullptr;
    const float* dt_bias = nullptr;
    int64_t state_offset = 0;
    StateArgs state = {};

    int64_t units() const { return (dst.cols + kConvChannels - 1) / kConvChannels; }
};

// An RMS norm of each `size` columns.
struct GroupNormArgs {
    Matrix dst = {};
    Matrix src = {};
    const float* weight = nullptr;  // [size] if shared by all groups, else [cols]
    int64_t size = 0;
    float eps = 0.0F;
    bool is_shared = false;
};

constexpr int64_t kLogitBlock = 64;  // logits that share a maximum and a sum

struct RowScan {
    float max;
    bool usable;  // no NaN, no +inf
};

struct IntegerBlock;

struct Kernels {
    const char* isa;
    IntegerBlock (*quantize_group)(Packing packing, const float* values);
    int64_t (*linear_scratch_bytes)(const Panels& weight);
    int64_t (*linear_block_rows)(const Panels& weight);  // that a worker holds at a time
    // What linear does first with each row where weights are integers; several workers may share
    // it.
    int64_t (*quantized_row_bytes)(const LinearArgs&);
    void (*quantize_rows)(const LinearArgs&, int64_t begin, int64_t end, std::byte* rows);
    void (*linear)(const LinearArgs&, int64_t begin, int64_t end, std::byte* scratch);
    int64_t (*shrink_scratch_bytes)(int64_t cols);
    void (*shrink)(const ShrinkArgs&, int64_t begin, int64_t end, std::byte* scratch);
    void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);
    void (*layer_norm)(const NormArgs&, int64_t begin, int64_t end);
    void (*pool)(const PoolArgs&, int64_t begin, int64_t end);
    void (*row_op)(const RowOpArgs&, int64_t begin, int64_t end);
    void (*embed)(const EmbedArgs&, int64_t begin, int64_t end);
    void (*prepare_heads)(const AttentionArgs&, int64_t begin, int64_t end);
    void (*prepare_latents)(const AttentionArgs&, const LatentArgs&, int64_t begin, int64_t end);
    int64_t (*attend_scratch_bytes)(int64_t group, int64_t head_dim, int64_t latent_rank);
    void (*attend)(const AttentionArgs&, const QueryTile&, int64_t partition, const NextKeys&,
                   std::byte* scratch);
    void (*merge)(const AttentionArgs&, const QueryTile&, std::byte* scratch);
    void (*short_conv)(const ConvArgs&, int64_t begin, int64_t end);
    void (*ssd_scan)(const SsdArgs&, int64_t begin, int64_t end);
    void (*delta_rule)(const DeltaArgs&, int64_t begin, int64_t end);
    void (*selective_scan)(const SelectiveArgs&, int64_t begin, int64_t end);
    void (*group_norm)(const GroupNormArgs&, int64_t begin, int64_t end);
    RowScan (*scan_row)(const float* x, int64_t count, float* block_maxima);
    uint64_t (*sum_softmax_weights)(const float* x, int64_t count, float max, float scale,
                                    uint64_t* block_weights);
};

}  // namespace octavo::cpu
