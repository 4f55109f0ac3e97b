// Attention over latent vectors, which all heads share: queries go into their space and sums come
// back from it by one small product for each head.
//
// Every product is an ordinary linear of a head's columns, and the softmax is attention's own: so a
// token's bits depend on nothing but itself and what it sees.
#include <algorithm>

#include "common/check.h"
#include "program.h"

namespace octavo {

using cpu::Matrix;

namespace {

constexpr const char* kName = "latent_attention";

Dtype wanted(const Packed& weight) {
    return weight.panels().packing() == cpu::Packing::BF16 ? Dtype::BF16 : Dtype::F32;
}

std::vector<cpu::Panels> panels_of(const std::vector<const Packed*>& weights, const char* which) {
    std::vector<cpu::Panels> panels;
    for (const Packed* weight : weights) {
        const Packed& first = *weights.front();
        check(weight->rows() == first.rows() && weight->cols() == first.cols() &&
                  weight->name() == first.name() && !weight->is_cut() &&
                  !weight->panels().is_quantized(),
              kName, ": each head's ", which, " must be of one shape, in f32 or bf16");
        panels.push_back(weight->panels());
    }
    return panels;
}

}  // namespace

void Program::latent_attention(const LatentBuffers& at_index, const LatentOptions& options) {
    const int64_t rank = options.rank;
    const int64_t rope = options.rope_dim;
    const auto own = static_cast<int64_t>(options.key_up.size());
    check(own >= 1 && options.value_up.size() == options.key_up.size() && options.first_head >= 0 &&
              options.first_head + own <= options.num_heads && options.num_heads <= 65536,
          kName, ": weights of ", own, " and ", options.value_up.size(), " heads from ",
          options.first_head, " on, of ", options.num_heads);
    const Packed& key_up = *options.key_up.front();
    const Packed& value_up = *options.value_up.front();
    check(rank >= 16 && rank % 16 == 0 && rope >= 2 && (rank + rope) % 16 == 0 &&
              rank + rope <= cpu::kMaxHeadDim,
          kName, ": rank ", rank, " and ", rope,
          " columns that turn; the first, and both together, ",
          "must be a multiple of 16, together at most ", cpu::kMaxHeadDim);
    check(key_up.rows() == rank && value_up.cols() == rank, kName, ": key_up has ", key_up.rows(),
          " rows and value_up ", value_up.cols(), " columns; both must have rank, ", rank);
    check(options.layer >= 0 && options.window >= 0 && options.group >= 0, kName, ": layer ",
          options.layer, ", window ", options.window, ", group ", options.group);
    check(static_cast<int64_t>(options.kv_norm.size()) == rank, kName, ": kv_norm has ",
          options.kv_norm.size(), " values; it must have rank, ", rank);
    const auto num_angles = static_cast<int64_t>(options.cos_sin.size());
    check(num_angles >= rope && num_angles % rope == 0, kName, ": cos_sin has ", num_angles,
          " values; it must have whole rows of ", rope);
    limits_.max_positions = std::min(limits_.max_positions, num_angles / rope);
    const int64_t heads = options.num_heads;
    const struct {
        const char* name;
        const Buffer& buffer;
        int64_t cols;
        Dtype dtype;
    } expected[] = {
        {"dst", at(kName, at_index.dst), heads * value_up.rows(), Dtype::F32},
        {"q", at(kName, at_index.q), heads * (key_up.cols() + rope), Dtype::F32},
        {"kv", at(kName, at_index.kv), rank + rope, Dtype::F32},
        {"nope", at(kName, at_index.nope), heads * key_up.cols(), wanted(key_up)},
        {"mixed", at(kName, at_index.mixed), heads * rank, wanted(value_up)},
    };
    for (const auto& one : expected) {
        const Matrix& matrix = one.buffer.matrix;
        check(
            one.buffer.rows == Rows::Tokens && matrix.cols == one.cols && matrix.dtype == one.dtype,
            kName, ": ", one.name, " must have rows T of ", one.cols, " columns of ",
            octavo::name_of(one.dtype), "; it has ", matrix.cols, " of ",
            octavo::name_of(matrix.dtype));
        for (const auto& other : expected) {
            if (&other != &one) {
                check_overlap(kName, one.buffer, other.buffer, false);
            }
        }
    }
    LatentAttention op{};
    op.key_up = panels_of(options.key_up, "key_up");
    op.value_up = panels_of(options.value_up, "value_up");
    op.dst = expected[0].buffer.matrix;
    op.latent = {.q = expected[1].buffer.matrix,
                 .kv = expected[2].buffer.matrix,
                 .nope = expected[3].buffer.matrix,
                 .rope_dim = rope,
                 .turns_neighbours = options.turns_neighbours,
                 .kv_norm = keep(options.kv_norm, options.kv_norm.size())};
    op.attention.layer = options.layer;
    op.attention.plan = plan_for({own, 1, rank + rope, options.window, true, options.group});
    cpu::AttentionArgs& args = op.attention.args;
    args.dst = expected[4].buffer.matrix;
    args.kv.num_kv_heads = 1;
    args.kv.head_dim = rank + rope;
    args.kv.latent_rank = rank;
    args.num_heads = own;
    args.heads = {heads, 1, options.first_head, 0};
    args.rotary_dim = rope;
    args.cos_sin = options.cos_sin.data();
    args.window = options.window;
    args.scale = options.scale;
    args.norm_eps = options.norm_eps;
    const int64_t query_bytes = max_tokens_ * own * (rank + rope) * 4;
    if (queries_.size() < query_bytes) {
        queries_ = Memory(query_bytes);
    }
    const cpu::Kernels& kernels = team_.kernels();
    scratch_bytes_ = std::max({scratch_bytes_, kernels.attend_scratch_bytes(own, rank + rope, rank),
                               kernels.linear_scratch_bytes(key_up.panels()),
                               kernels.linear_scratch_bytes(value_up.panels())});
    push({Rows::Tokens, std::move(op)});
}

void Program::attend_latents(const LatentAttention& op, const KVCache& kv, const Step& step,
                             std::atomic<int64_t>& next_part, int worker) {
    const cpu::AttentionArgs args = step_args(op.attention, kv, step);
    const int64_t count = step.num_tokens();
    const Range units = split(count * (args.num_heads + 1), worker, team_.num_threads());
    team_.kernels().prepare_latents(args, op.latent, units.begin, units.end);
    team_.barrier();

    const int64_t first = args.heads.first_head;
    const int64_t nope_dim = op.latent.nope_dim(args.heads.num_heads);
    const int64_t dim = args.kv.head_dim;
    const Matrix queries{reinterpret_cast<std::byte*>(args.q), args.num_heads * dim, Dtype::F32};
    multiply_heads(op.key_up, op.latent.nope.columns(first * nope_dim, nope_dim),
                   queries.columns(0, dim), count, worker);
    team_.barrier();

    attend_tiles(op.attention, args, next_part, worker);
    team_.barrier();

    const int64_t rank = args.kv.latent_rank;
    const int64_t value_dim = op.dst.cols / args.heads.num_heads;
    multiply_heads(op.value_up, args.dst.columns(first * rank, rank),
                   op.dst.columns(first * value_dim, value_dim), count, worker);
}

// Head h's columns of src, which are src.cols further on for each, by weight h to those of dst.
void Program::multiply_heads(const std::vector<cpu::Panels>& weights, const Matrix& src,
                             const Matrix& dst, int64_t num_rows, int worker) {
    const int64_t per_head = weights.front().count();
    const auto num_heads = static_cast<int64_t>(weights.size());
    const Range units = split(num_heads * per_head, worker, team_.num_threads());
    for (int64_t unit = units.begin; unit < units.end;) {
        const int64_t head = unit / per_head;
        const int64_t first = unit % per_head;
        const int64_t end = std::min(per_head, first + units.end - unit);
        cpu::LinearArgs args{};
        args.src = src.columns(head * src.cols, src.cols);
        args.dst = dst.columns(head * dst.cols, weights.front().rows);
        args.num_rows = num_rows;
        args.weight = weights[static_cast<size_t>(head)];
        team_.kernels().linear(args, first, end, scratch(worker));
        unit += end - first;
    }
}

}  // namespace octavo
