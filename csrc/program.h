// A model's step as instructions over buffers in one arena, checked when added and run as a whole.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "adapters.h"
#include "attention_plan.h"
#include "common/memory.h"
#include "common/ranks.h"
#include "common/team.h"
#include "cpu/kernels.h"
#include "experts.h"
#include "kv_cache.h"
#include "packed.h"
#include "state_cache.h"
#include "step.h"

namespace octavo {

// Tokens of the step, or those whose logits are wanted.
enum class Rows : uint8_t { Tokens, Selected };

struct Buffer {
    cpu::Matrix matrix;
    Rows rows;
};

struct AttentionOptions {
    int64_t layer;
    AttentionShape shape;  // of the heads that this process computes
    cpu::HeadRange heads;  // where they are among all
    float scale;
    int64_t rotary_dim;
    std::span<const float> cos_sin;  // [positions, rotary_dim]; must outlive the program
    float soft_cap;
    std::span<const float> q_norm;
    std::span<const float> k_norm;
    float norm_eps;
    cpu::HeadNorm norm;
    bool norm_after_rope;
    std::span<const float> alibi;       // [num_heads], or empty
    bool is_whole;                      // nothing is kept: all of a sequence is in the step
    std::span<const float> sinks = {};  // [num_heads], or empty
    // [positions], or empty: what queries are multiplied by; must outlive the program.
    std::span<const float> query_scales = {};
    std::array<int64_t, cpu::kRopeAxes> rope_sections = {};  // pairs of columns by axis; 0: no axes
    bool rope_interleaved = false;
};

// Where a linear layer's adapters are, and the buffer for the rows as they shrink them.
struct AdapterOptions {
    const AdapterSlots* slots = nullptr;  // null: there are none
    int64_t site = 0;
    int u = -1;
};

// A layer's attention over what an encoder left.
struct CrossOptions {
    int64_t layer;
    int64_t num_heads;
    int64_t head_dim;
    int64_t length;  // keys of a sequence
    float scale;
};

struct MoeOptions {
    std::vector<Packed*> gate_up;  // of the expert in each own slot; see move_experts
    std::vector<Packed*> down;
    int64_t first_slot;   // of the own ones, which are in a row; a rank may have some of them
    int64_t num_slots;    // of all ranks together
    int64_t num_experts;  // no more than there are slots; see first_slots
    int64_t top_k;
    bool renormalise;  // weights are shares among the chosen experts, not among all
    cpu::Activation activation;
    RoutingOptions routing = {};
    std::span<const float> routing_bias = {};  // [experts], or empty
    // Of all own slots side by side, or empty; copied.
    std::span<const float> gate_up_bias = {};
    std::span<const float> down_bias = {};
};

// Attention over latent vectors: each head's queries are brought into their space, and what it sums
// up there is brought back, by weights of its own.
struct LatentOptions {
    int64_t layer;
    int64_t num_heads;   // of all
    int64_t first_head;  // of those that this process computes, as many as there are weights
    int64_t rank;
    std::vector<const Packed*> key_up;    // of each own head: [rank, nope]
    std::vector<const Packed*> value_up;  // [value_dim, rank]
    float scale;
    int64_t rope_dim;
    std::span<const float> cos_sin;  // [positions, rope_dim]; must outlive the program
    bool turns_neighbours;
    std::span<const float> kv_norm;
    float norm_eps;
    int64_t window;
    int64_t group;
};

// `nope` is for the queries' parts as key_up takes them, `mixed` for the sums as value_up does.
struct LatentBuffers {
    int dst, q, kv, nope, mixed;
};

// `gathered` and `results` have a row of src's width for each token and each of its experts,
// `hidden` one of an expert's width.
struct MoeBuffers {
    int dst, src, scores, gathered, hidden, results;
};

struct ConvOptions {
    int64_t layer;  // of those that have a state
    int64_t kernel;
    std::span<const float> weight;  // [kernel, channels]
    std::span<const float> bias;    // or empty
    cpu::Activation activation;
};

struct SsdOptions {
    int64_t layer;
    int64_t offset;  // of its state in the layer's
    int64_t heads, head_dim, groups, state_size;
    std::span<const float> a, d, dt_bias;  // [heads]
    float dt_min, dt_max;
};

struct DeltaOptions {
    int64_t layer;
    int64_t offset;
    int64_t key_heads, value_heads, key_dim, value_dim;
    std::span<const float> a, dt_bias;  // [value_heads]
};

struct SelectiveBuffers {
    int dst, x, dt, b, c;
};

struct SelectiveOptions {
    int64_t layer;
    int64_t offset;  // of its state in the layer's
    int64_t state_size;
    std::span<const float> a;  // [state_size, columns]
    std::span<const float> d, dt_bias;
};

// So many rows each worker norms and quantises for itself, and routes to experts: sooner done than
// waiting for the others' share.
constexpr int64_t kOwnRows = 3;
constexpr int64_t kOwnPairs = 8;  // of a token and an expert, the same: rows are narrower there

class Program {
  public:
    // Activations meet integer weights in so many bits, 8 or 16. With `ranks`, all of them run the
    // same program together, each with its part of the weights and of the heads: see Share. With
    // `peers` each has tokens of its own, and some experts that it computes for all: see Exchange.
    // `joins_phases`: workers wait for each other only where they must (program_phases.cpp).
    Program(Team& team, int64_t arena_bytes, int64_t max_tokens, int64_t max_logit_rows,
            int activation_bits, Ranks* ranks = nullptr, Ranks* peers = nullptr,
            bool joins_phases = true);

    // Each throws ValueError when it does not fit the buffers. Tables and weights must outlive the
    // program; vectors are copied.
    int buffer(int64_t offset, int64_t cols, Dtype dtype, Rows rows);
    void embed(int dst, const Packed& table, float scale, cpu::EmbedOf of, int64_t offset);
    // Columns of the rows that the step brings, from `first` on. Sparse: zeros where a token has
    // none; else all tokens have one.
    void input(int dst, int64_t first, bool is_sparse);
    void rms_norm(int dst, int src, std::span<const float> weight, float eps, int add,
                  float add_scale);
    void layer_norm(int dst, int src, std::span<const float> weight, std::span<const float> bias,
                    float eps, int add, float add_scale);
    void linear(int dst, int src, const Packed& weight, std::span<const float> bias,
                cpu::LinearMode mode, cpu::Activation activation, float scale,
                const AdapterOptions& adapters = {});
    void attention(int dst, int qkv, const AttentionOptions& options);
    void latent_attention(const LatentBuffers& buffers, const LatentOptions& options);
    void moe(const MoeBuffers& buffers, const MoeOptions& options);
    // Of each mixture: how many rows each expert was chosen for so far, on any rank.
    std::vector<std::vector<int64_t>> expert_tokens() const { return expert_tokens_; }
    // The same by slot.
    std::vector<std::vector<int64_t>> slot_tokens() const { return slot_tokens_; }
    // From now on the slots of each mixture have these experts: their weights are copied from rank
    // to rank. All ranks or peers call it between the same steps. Throws ValueError where an expert
    // has no slot, and RuntimeError when another rank has failed.
    void move_experts(const std::vector<std::vector<int32_t>>& layouts);
    void glu(int dst, int src, cpu::Activation activation);
    void activation(int dst, int src, cpu::Activation activation);
    void add(int dst, int x, int y, float scale);
    void scale(int dst, int src, float factor);
    void soft_cap(int dst, int src, float cap);
    void clamp(int dst, int src, float limit);
    void gate(int dst, int src, int scores);
    void columns(int dst, int src, int64_t first);
    void join(int dst, int x, int y);
    void multiply(int dst, int x, int y, cpu::Activation activation);
    void group_norm(int dst, int src, std::span<const float> weight, float eps, int64_t size);
    void short_conv(int dst, int src, const ConvOptions& options);
    void ssd_scan(int dst, int xbc, int dt, const SsdOptions& options);
    void delta_rule(int dst, int qkv, int gates, const DeltaOptions& options);
    void selective_scan(const SelectiveBuffers& buffers, const SelectiveOptions& options);
    // Of residuals of several streams (program_streams.cpp). mix: each stream of dst is a sum of
    // src's, by weights that each row brings.
    void mix(int dst, int src, int weights, int64_t inputs, float offset);
    void match_rms(int dst, int src, int like, float floor);
    void sparsify(int dst, int src, float deviations);
    void scale_columns(int dst, int src, std::span<const float> factors);
    void convert(int dst, int src);
    void select_rows(int dst, int src);
    void pool(int dst, int src, cpu::PoolKind kind);

    // Of models with an encoder (program_cross.cpp). The cross cache has slots of `length` tokens
    // in whole blocks, which begin anew with each slot.
    void cross_attention(int dst, int q, const CrossOptions& options);
    void store_cross(int src, const CrossOptions& options);  // rows of [k heads | v heads]
    void features(int dst);                                  // the step's, rounded to dst's dtype
    void shift_rows(int dst, int src);  // each row to the next one of its sequence; first: zeros

    // Runs a step. Throws ValueError when its arrays do not agree or exceed the plan, and
    // RuntimeError when another rank has failed. One at a time.
    void run(const KVCache& kv, const Step& step, const KVCache* cross = nullptr);
    // This rank's part of a step that peers have begun with: there are no tokens of its own.
    void run_empty();
    int64_t num_instructions() const { return static_cast<int64_t>(instructions_.size()); }

    // The buffer, of which `num_rows` rows are to be read.
    const Buffer& readable(int index, int64_t num_rows) const;

  private:
    // How the workers of all ranks share an instruction. What lies in memory that all see is made
    // by all: rows by whoever is next, and products with whole weights. Only the own workers can
    // read what a process has for itself: its part of a weight, its heads' keys and values.
    struct Share {
        int worker;
        int workers;
    };
    struct Embed {
        cpu::EmbedArgs args;
        bool is_cut;             // only some of the ids are in the table
        bool is_input = false;   // there is no table: all rows come with the step
        bool is_sparse = false;  // or those that it brings, and zeros
        int64_t first = 0;       // column of what it brings
    };
    struct Product {
        cpu::LinearArgs args;
        bool is_cut;
    };
    struct Experts {
        std::vector<cpu::Panels> weights;  // by own slot
        int64_t first_slot;
        int64_t first_column;
        bool is_own;  // other ranks have other experts, or other columns of these
        std::vector<std::span<float>> biases;     // of each; or empty
        std::vector<std::span<std::byte>> bytes;  // of each weight
    };
    // What peers show each other at a mixture of experts: who has how many tokens, their rows and
    // the experts that they chose; and what came of them. All mixtures of a program share it.
    struct Exchange {
        Memory shared;
        int32_t* counts = nullptr;   // by rank
        int32_t* experts = nullptr;  // [ranks, max_tokens * top_k]
        float* weights = nullptr;
        float* rows = nullptr;     // [ranks, max_tokens, cols]
        float* results = nullptr;  // by place, [ranks * max_tokens * top_k, cols]
        int64_t top_k = 0;
        int64_t cols = 0;
        // This rank's own, by place too: of its experts' rows only.
        Memory gathered, hidden;
        Pairs pairs;              // of all ranks' tokens, one rank's behind another's
        std::vector<int32_t> of;  // by token: its place among `rows`
        int64_t first_token = 0;  // of this rank's
    };
    struct LayerNorm {
        cpu::NormArgs args;
    };
    struct Attention {
        cpu::AttentionArgs args;  // kv holds the shape that the cache must have
        int64_t layer;
        size_t plan;
    };
    struct LatentAttention {
        Attention attention;  // one KV head; its dst are the sums in latent space
        cpu::LatentArgs latent;
        cpu::Matrix dst;
        std::vector<cpu::Panels> key_up, value_up;
    };
    struct StoreCross {
        cpu::AttentionArgs args;
        int64_t layer;
    };
    struct Features {
        cpu::RowOpArgs args;
    };
    struct Shift {
        cpu::RowOpArgs args;
    };
    struct Quantize {
        cpu::LinearArgs args;  // of the instruction after it
    };
    struct Shrink {
        cpu::ShrinkArgs args;  // of the instruction after it
    };
    struct Join {
        cpu::RowOpArgs left;  // each into its part of dst's columns
        cpu::RowOpArgs right;
    };
    struct Gate {
        cpu::RowOpArgs scale;  // by a factor that each row brings
        cpu::Matrix scores;
    };
    struct Mix {
        cpu::Matrix dst;
        cpu::Matrix src;
        cpu::Matrix weights;  // [streams of dst, streams of src]
        int64_t width;        // of a stream
        float offset;         // to add to each weight
    };
    struct MatchRms {
        cpu::Matrix dst;
        cpu::Matrix src;
        cpu::Matrix like;
        float floor;  // of src's mean square
    };
    struct Sparsify {
        cpu::Matrix dst;
        cpu::Matrix src;
        float deviations;  // above the mean, from where on values are kept
    };
    struct ScaleColumns {
        cpu::Matrix dst;
        cpu::Matrix src;
        const float* factors;
    };
    struct Moe {
        cpu::Matrix src, gathered, hidden, results;  // a row for each token; then for each pair
        cpu::Matrix dst;
        Routing routing;
        ExpertSlots slots;
        Experts gate_up, down;
        cpu::Activation activation;
        size_t number;  // among the mixtures
    };
    template <class Args>
    struct Recurrent {
        Args args;
        int64_t layer;   // of those that have a state
        int64_t values;  // that it must have at least
    };
    struct Instruction {
        Rows rows;
        std::variant<Embed, cpu::NormArgs, LayerNorm, Quantize, Shrink, Product, cpu::RowOpArgs,
                     Join, cpu::PoolArgs, Attention, LatentAttention, Gate, Moe, cpu::GroupNormArgs,
                     Recurrent<cpu::ConvArgs>, Recurrent<cpu::SsdArgs>, Recurrent<cpu::DeltaArgs>,
                     Recurrent<cpu::SelectiveArgs>, StoreCross, Features, Shift, Mix, MatchRms,
                     Sparsify, ScaleColumns>
            args;
        // Who may begin with it before all others are done with what is before: program_phases.cpp.
        bool is_of_own_rows = false;  // a worker has touched no rows but its own since they met
        bool is_copied = false;       // of few rows each worker makes all, for itself
        bool prepares_heads = false;  // a product: of few rows it makes the attention behind ready
    };

    // program.cpp
    const Buffer& at(const char* name, int index) const;
    int64_t max_rows(Rows rows) const;
    void check_overlap(const char* name, const Buffer& dst, const Buffer& src, bool in_place) const;
    cpu::NormArgs norm_args(const char* name, int dst, int src, std::span<const float> weight,
                            float eps, int add, float add_scale);
    void add_head_norms(const AttentionOptions& options, cpu::AttentionArgs& args);
    float* keep(std::span<const float> values, size_t padded);
    void row_op(const char* name, int dst, int src, const cpu::RowOpArgs& args);
    void quantize(const Buffer& src, const cpu::LinearArgs& args);
    void adapt(const Buffer& to, const Buffer& src, const Packed& weight,
               const AdapterOptions& options, cpu::LinearArgs& args);
    size_t plan_for(const AttentionShape& shape);

    // program_phases.cpp
    struct Touched {
        std::array<cpu::Matrix, 3> read;
        std::array<cpu::Matrix, 2> written;
    };
    void push(Instruction instruction);
    void join_rows();
    void join_norm(const Product& product);
    void join_heads(const Attention& attention);
    static std::optional<Touched> touched_rows(const Instruction& instruction);
    static const cpu::NormArgs* norm_of(const Instruction& instruction);
    bool are_free(const Touched& before, const Touched& now, Rows rows) const;
    bool are_apart(const cpu::Matrix& a, const cpu::Matrix& b, Rows rows) const;
    bool needs_meeting(size_t index, size_t end, bool is_few) const;
    // A worker's own rows, of a norm or as they are converted behind it.
    std::byte* copy_of(int worker, bool is_converted) const {
        return copies_.data() + (2 * worker + (is_converted ? 1 : 0)) * copy_bytes_;
    }
    template <class Args>
    void compute_copy(Args args, void (*kernel)(const Args&, int64_t, int64_t), int64_t num_rows,
                      Range own, std::byte* copy);
    void prepare_own_heads(const cpu::AttentionArgs& args, int64_t num_tokens, int worker);
    bool completes_head(const cpu::AttentionArgs& args, int64_t unit, int worker);

    // program_latent.cpp
    void attend_latents(const LatentAttention& op, const KVCache& kv, const Step& step,
                        std::atomic<int64_t>& next_part, int worker);
    void multiply_heads(const std::vector<cpu::Panels>& weights, const cpu::Matrix& src,
                        const cpu::Matrix& dst, int64_t num_rows, int worker);

    // program_experts.cpp
    void run_moe(const Moe& moe, int64_t num_tokens, int worker);
    const Pairs& route_tokens(const Moe& moe, int64_t num_tokens, int worker);
    cpu::LinearArgs of_experts(const cpu::Panels& weight, const cpu::Matrix& src,
                               const cpu::Matrix& dst, cpu::Activation activation) const;
    void quantize_pairs(const cpu::LinearArgs& args, Range rows);
    Experts experts_of(const MoeOptions& options, const std::vector<Packed*>& weights,
                       std::span<const float> biases);
    void for_each_expert(const Experts& experts, const Pairs& pairs, const cpu::Matrix& src,
                         const cpu::Matrix& dst, cpu::Activation activation, bool shares_rows,
                         int worker);
    void make_exchange(const Moe& moe);
    void run_exchange(const Moe& moe, int64_t num_tokens, int worker);
    void show_tokens(const Moe& moe, Range tokens);
    void place_all(const Moe& moe);
    void count(const Moe& moe, const Pairs& pairs);
    void move_experts(Moe& moe, const ExpertSlots& to, Ranks& group);

    // program_cross.cpp
    void check_cross(const char* name, const CrossOptions& options);
    void check_cross_layer(const cpu::AttentionArgs& args, int64_t layer) const;
    void place_cross(Step& step, const KVCache* cross);
    void run_instruction(const StoreCross& store, const Step& step, int worker);
    void run_instruction(const Features& features, const Step& step, Range rows);

    // program_states.cpp
    struct StateRows {
        const char* which;
        int index;     // of a buffer in f32 with rows T
        int64_t cols;  // that it must have
        cpu::Matrix& to;
    };
    struct StateConstant {
        const char* which;
        std::span<const float> values;
        int64_t size;  // that it must have; 0: there is none
        const float*& to;
    };
    void bind_states(const char* name, std::initializer_list<StateRows> rows,
                     std::initializer_list<StateConstant> constants);
    template <class Args, class Options>
    void add_scan(const char* name, Args args, const Options& options, int64_t values);
    const Buffer& f32_of_tokens(const char* name, const char* which, int index) const;
    void check_states(const Step& step) const;

    // program_streams.cpp
    void run_instruction(const Mix& mix, Range rows);
    static void run_instruction(const MatchRms& match, Range rows);
    static void run_instruction(const Sparsify& sparsify, Range rows);
    static void run_instruction(const ScaleColumns& scale, Range rows);

    // program_run.cpp
    void prepare(const KVCache& kv, Step& step, const KVCache* cross);
    void make_room();  // for what no step has needed before
    void check_ranks() const;
    void place_adapters(const Step& step);
    void check_cache(const Attention& attention, const KVCache& kv) const;
    void run_worker(const KVCache& kv, const Step& step, int worker);
    void embed_rows(const Embed& embed, const Step& step, int64_t count, int worker);
    void multiply(const Product& product, std::atomic<int64_t>& next_part, int worker);
    void attend(const Attention& attention, const KVCache& kv, const Step& step,
                std::atomic<int64_t>& next_part, int worker, bool is_prepared);
    cpu::AttentionArgs step_args(const Attention& attention, const KVCache& kv,
                                 const Step& step) const;
    void attend_tiles(const Attention& attention, const cpu::AttentionArgs& args,
                      std::atomic<int64_t>& next_part, int worker);
    Share own(int worker) const { return {worker, team_.num_threads()}; }
    Share all(int worker) const;
    void meet();  // all workers of all ranks
    std::byte* scratch(int worker) const { return scratch_.data() + worker * scratch_bytes_; }

    Team& team_;
    Ranks* ranks_;  // null: this process is alone
    Ranks* peers_;  // null: it has all experts, or those that `ranks_` leave to it
    int64_t max_tokens_;
    int64_t max_logit_rows_;
    int activation_bits_;
    bool joins_phases_;
    Memory arena_;
    std::vector<Buffer> buffers_;
    std::vector<Instruction> instructions_;
    std::deque<std::vector<float>> constants_;
    StepLimits limits_;

    const AdapterSlots* adapters_ = nullptr;
    // Of the step under way, for rows of tokens and those whose logits are wanted:
    struct RowSlots {
        std::vector<int32_t> slots;
        std::vector<int32_t> adapted;  // rows with an adapter, by its slot
    };
    RowSlots row_slots_[2];
    const RowSlots& slots_of(Rows rows) const { return row_slots_[static_cast<size_t>(rows)]; }

    // Of the cross cache, where any instruction reads or writes it:
    int64_t cross_length_ = 0;
    int64_t feature_cols_ = 0;
    bool has_shifts_ = false;
    const KVCache* cross_ = nullptr;     // of the step under way
    std::vector<int32_t> cross_tables_;  // 0, 1, 2, …
    std::vector<int32_t> cross_stores_;  // slot of each token's keys and values
    std::vector<int32_t> shifted_rows_;

    Exchange exchange_;
    Pairs pairs_;                                      // of the mixture of experts under way
    std::vector<Pairs> own_pairs_;                     // by worker: the same, of few tokens
    std::vector<std::vector<int64_t>> expert_tokens_;  // by mixture and expert: rows so far
    std::vector<std::vector<int64_t>> slot_tokens_;    // by mixture and slot
    Memory moved_;                                     // pieces of experts on their way

    std::vector<AttentionPlan> plans_;
    std::atomic<int64_t> next_part_[2] = {};  // of this instruction and the next, in turns
    Memory queries_;
    Memory quantized_;  // rows of the product under way
    int64_t quantized_bytes_ = 0;
    Memory partials_;
    Memory copies_;           // by worker: the rows of a norm that it made for itself
    int64_t copy_bytes_ = 0;  // of one of a worker's two
    // By head of the attention that is being made ready: panels of its columns that are there.
    std::vector<std::atomic<int32_t>> head_panels_;
    Memory scratch_;
    int64_t scratch_bytes_ = 0;  // of one worker
};

}  // namespace octavo
