// For a query row the result is always the same sum: within a partition of 512 positions, tiles of
// 128 in ascending order by online softmax; partitions joined in ascending order by one formula.
// What a row may not see (later tokens, tokens before its window, memory behind the sequence's end)
// is not merely weighted with zero: it is never multiplied, for it may hold NaN.
#include "cpu/attention.h"

#include <algorithm>
#include <cmath>

#include "common/range.h"
#include "cpu/dot.h"
#include "cpu/softmax_state.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kBlocksPerTile = kSoftmaxTokens / kBlockTokens;

void scale_row(float* values, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
        store(values + i, load(values + i) * broadcast(factor));
    }
}

template <class Weights>
class Attend {
  public:
    Attend(const AttentionArgs& args, const QueryTile& tile, float* scores)
        : args_(args),
          tile_(tile),
          dim_(args.kv.head_dim),
          group_(args.group()),
          num_rows_(tile.num_tokens * group_),
          scores_(scores) {}

    void partition(int64_t index, const State& state) {
        std::fill_n(state.values, num_rows_ * dim_, 0.0F);
        std::fill_n(state.maximum, num_rows_, -INFINITY);
        std::fill_n(state.sum, num_rows_, 0.0F);
        const int64_t end = std::min((index + 1) * kPartitionTokens, seen(num_rows_ - 1).end);
        // Another thread may compute the next partition of a context that is split.
        fetch_end_ = tile_.partials == nullptr ? seen(num_rows_ - 1).end : end;
        for (start_ = index * kPartitionTokens; start_ < end; start_ += kSoftmaxTokens) {
            if (seen(0).begin < start_ + kSoftmaxTokens) {
                compute_tile(state);
            }
        }
    }

  private:
    static constexpr bool kIsScaled = requires { Weights::kUnit; };
    static constexpr int64_t kStepsPerBlock = kBlockTokens / Weights::kColumns;

    // Blocks lie anywhere, so the hardware cannot guess the next one: while a tile is computed, the
    // blocks of the next are fetched, keys beside keys and values beside values.
    void fetch_ahead(int64_t index_in_tile, bool is_value) const {
        const int64_t block_in_table = start_ / kBlockTokens + kBlocksPerTile + index_in_tile;
        if (block_in_table * kBlockTokens >= fetch_end_) {
            return;
        }
        const int64_t panels = args_.kv.panels_bytes();
        const std::byte* from = args_.kv.keys(tile_.block_table[block_in_table], tile_.kv_head) +
                                (is_value ? panels : 0);
        for (int64_t i = 0; i < panels; i += kCacheLine) {
            prefetch(from + i);
        }
    }

    // Positions that row r sees.
    Range seen(int64_t r) const {
        const int64_t behind = tile_.first_position + r / group_ + 1;
        const int64_t begin = args_.window > 0 ? std::max<int64_t>(0, behind - args_.window) : 0;
        if (args_.is_causal) {
            return {begin, behind};
        }
        const int64_t end = tile_.end_position;
        return {begin, args_.window > 0 ? std::min<int64_t>(end, behind - 1 + args_.window) : end};
    }

    // The same within the tile under way; empty if begin >= end.
    Range seen_here(int64_t r) const {
        const Range range = seen(r);
        return {std::max<int64_t>(0, range.begin - start_),
                std::min<int64_t>(kSoftmaxTokens, range.end - start_)};
    }

    int64_t block(int64_t index_in_tile) const {
        return tile_.block_table[start_ / kBlockTokens + index_in_tile];
    }
    const std::byte* keys(int64_t index_in_tile) const {
        return args_.kv.keys(block(index_in_tile), tile_.kv_head);
    }
    const std::byte* values(int64_t index_in_tile, int64_t column) const {
        return args_.kv.values(block(index_in_tile), tile_.kv_head) +
               column * kBlockTokens * args_.kv.element_bytes();
    }
    const float* query(int64_t r) const {
        const int64_t token = tile_.first_token + r / group_;
        const int64_t head = tile_.kv_head * group_ + r % group_;
        return args_.q + (token * args_.num_heads + head) * dim_;
    }
    // Of a block's tokens. They go into scores and weights, once for each token, not for each
    // column.
    static Vec scales(const uint16_t* from) { return load_bf16(from) * broadcast(Weights::kUnit); }

    float* scores(int64_t r) const { return scores_ + r * kSoftmaxTokens; }

    void compute_tile(const State& state) {
        for (int64_t r = 0; r < num_rows_; r += kTileRows) {
            const int64_t end = std::min<int64_t>(r + kTileRows, num_rows_);
            // Rows of later tokens see further: the last row ends last, the first begins first.
            const Range any{seen_here(r).begin, seen_here(end - 1).end};
            if (any.begin >= any.end) {
                continue;
            }
            compute_scores(r, end, any);
            for (int64_t row = r; row < end; ++row) {
                softmax(row, state);
            }
            add_values(r, end, state);
        }
    }

    // Scores of rows [first, end) for the blocks that any of them sees; lanes beyond hold anything.
    void compute_scores(int64_t first, int64_t end, Range any) {
        const int64_t rows = end - first;
        const void* x[kTileRows];
        for (int64_t i = 0; i < rows; ++i) {
            x[i] = query(first + i);
        }
        const int64_t end_block = (any.end + kBlockTokens - 1) / kBlockTokens;
        int width = max_panels(rows);
        for (int64_t b = any.begin / kBlockTokens; b < end_block; b += width) {
            while (b + width > end_block) {
                width /= 2;
            }
            const std::byte* panels[kMaxPanels];
            for (int i = 0; i < width; ++i) {
                panels[i] = keys(b + i);
                if (first == 0) {
                    fetch_ahead(b + i, false);
                }
            }
            alignas(64) float out[kTileFloats] = {};
            kDots.get(rows, width)(x, panels, 1, dim_ / Weights::kColumns, out);
            for (int64_t i = 0; i < rows * width; ++i) {
                const int64_t at = b + i % width;
                Vec score = load(out + i * kLanes);
                if constexpr (kIsScaled) {
                    score = score * scales(args_.kv.key_scales(block(at), tile_.kv_head));
                }
                store(scores(first + i / width) + at * kLanes, score);
            }
        }
    }

    // Turns a row's scores into weights, times the scales of V, and brings its state to the new
    // maximum.
    void softmax(int64_t r, const State& state) const {
        const Range here = seen_here(r);
        if (here.begin >= here.end) {
            return;
        }
        float* s = scores(r);
        const int64_t first = here.begin / kLanes * kLanes;
        const Vec nothing = broadcast(-INFINITY);
        const Vec cap = broadcast(args_.soft_cap);
        Vec highest = nothing;
        for (int64_t i = first; i < here.end; i += kLanes) {
            Vec score = load(s + i) * broadcast(args_.scale);
            if (args_.soft_cap > 0) {
                score = cap * tanh(score / cap);
            }
            score = select(lanes_between(here.begin - i, here.end - i), score, nothing);
            highest = max(highest, score);
            store(s + i, score);
        }
        const float before = state.maximum[r];
        const float now = std::max(before, reduce_max(highest));
        const Vec zero = broadcast(0.0F);
        Vec sum = zero;
        for (int64_t i = first; i < here.end; i += kLanes) {
            const Vec weight = exp(load(s + i) - broadcast(now));
            const Vec kept = select(lanes_between(here.begin - i, here.end - i), weight, zero);
            sum = sum + kept;
            if constexpr (kIsScaled) {
                const int64_t at = block(i / kBlockTokens);
                store(s + i, kept * scales(args_.kv.value_scales(at, tile_.kv_head)));
            } else {
                store(s + i, kept);
            }
        }
        state.maximum[r] = now;
        if (state.sum[r] == 0.0F) {
            state.sum[r] = reduce_add(sum);
            return;
        }
        const float factor = exp_of(before - now);
        state.sum[r] = std::fma(state.sum[r], factor, reduce_add(sum));
        scale_row(state.values + r * dim_, factor, dim_);
    }

    // values += weights · V: whole blocks that all rows see together, what is left row by row.
    // Either way a row's sum runs over its tokens in ascending order.
    void add_values(int64_t first, int64_t end, const State& state) {
        const int64_t first_block = (seen_here(end - 1).begin + kBlockTokens - 1) / kBlockTokens;
        const int64_t end_block = seen_here(first).end / kBlockTokens;
        if (first_block >= end_block) {
            for (int64_t r = first; r < end; ++r) {
                add_tokens(r, seen_here(r), state);
            }
            return;
        }
        for (int64_t r = first; r < end; ++r) {
            add_tokens(r, {seen_here(r).begin, first_block * kBlockTokens}, state);
        }
        add_blocks(first, end, {first_block, end_block}, state);
        for (int64_t r = first; r < end; ++r) {
            add_tokens(r, {end_block * kBlockTokens, seen_here(r).end}, state);
        }
    }

    void add_blocks(int64_t first, int64_t end, Range blocks, const State& state) {
        for (int64_t b = blocks.begin; b < blocks.end && first == 0; ++b) {
            fetch_ahead(b, true);
        }
        const int64_t rows = end - first;
        const void* x[kTileRows];
        for (int64_t i = 0; i < rows; ++i) {
            x[i] = scores(first + i) + blocks.begin * kBlockTokens;
        }
        int width = max_panels(rows);
        for (int64_t c = 0; c < dim_; c += width * kLanes) {
            while (c + width * kLanes > dim_) {
                width /= 2;
            }
            const std::byte* panels[kBlocksPerTile * kMaxPanels];
            int64_t count = 0;
            for (int64_t b = blocks.begin; b < blocks.end; ++b) {
                for (int i = 0; i < width; ++i) {
                    panels[count++] = values(b, c + i * kLanes);
                }
            }
            alignas(64) float out[kTileFloats];
            for (int64_t i = 0; i < rows * width; ++i) {
                store(out + i * kLanes, load(value_at(state, first, c, i, width)));
            }
            kDots.get(rows, width)(x, panels, blocks.end - blocks.begin, kStepsPerBlock, out);
            for (int64_t i = 0; i < rows * width; ++i) {
                store(value_at(state, first, c, i, width), load(out + i * kLanes));
            }
        }
    }

    float* value_at(const State& state, int64_t first, int64_t c, int64_t i, int width) const {
        return state.values + (first + i / width) * dim_ + c + i % width * kLanes;
    }

    void add_tokens(int64_t r, Range tokens, const State& state) const {
        const float* weights = scores(r);
        for (int64_t c = 0; c < dim_ && tokens.begin < tokens.end; c += kLanes) {
            float* to = state.values + r * dim_ + c;
            Vec sum = load(to);
            for (int64_t t = tokens.begin; t < tokens.end; ++t) {
                const std::byte* panel = values(t / kBlockTokens, c);
                sum = fma(broadcast(weights[t]), token_values(panel, t % kBlockTokens), sum);
            }
            store(to, sum);
        }
    }

    static Vec token_values(const std::byte* panel, int64_t token) {
        return Weights::column(panel + token / Weights::kColumns * Weights::kStepBytes,
                               static_cast<int>(token % Weights::kColumns));
    }

    static constexpr DotTable<Weights> kDots{};

    const AttentionArgs& args_;
    const QueryTile& tile_;
    const int64_t dim_;
    const int64_t group_;
    const int64_t num_rows_;
    float* const scores_;    // [rows, kSoftmaxTokens]
    int64_t start_ = 0;      // position where the tile under way starts
    int64_t fetch_end_ = 0;  // blocks that start before it are wanted by this thread
};

template <class Weights>
void attend_with(const AttentionArgs& args, const QueryTile& tile, int64_t partition,
                 float* scratch) {
    const int64_t dim = args.kv.head_dim;
    const int64_t rows = tile.num_tokens * args.group();
    Attend<Weights> work(args, tile, scratch);
    scratch += query_tile_rows(args.group()) * kSoftmaxTokens;
    if (tile.partials != nullptr) {
        const int64_t index = partition - tile.first_partition;
        work.partition(partition,
                       State(tile.partials + index * state_floats(rows, dim), rows, dim));
        return;
    }
    const State total(scratch, rows, dim);
    const State part(scratch + state_floats(rows, dim), rows, dim);
    work.partition(tile.first_partition, total);
    for (int64_t p = tile.first_partition + 1; p < tile.end_partition; ++p) {
        work.partition(p, part);
        join(total, part, rows, dim);
    }
    write(args, tile, total);
}

}  // namespace

int64_t attend_scratch_bytes(int64_t group, int64_t head_dim) {
    const int64_t rows = query_tile_rows(group);
    return (rows * kSoftmaxTokens + 2 * state_floats(rows, head_dim)) * 4;
}

void attend(const AttentionArgs& args, const QueryTile& tile, int64_t partition,
            std::byte* scratch) {
    auto* floats = reinterpret_cast<float*>(scratch);
    switch (args.kv.format) {
        case KVFormat::F32:
            return attend_with<F32Weights>(args, tile, partition, floats);
        case KVFormat::BF16:
            return attend_with<Bf16Weights>(args, tile, partition, floats);
        case KVFormat::Int8:
            return attend_with<Int8Weights>(args, tile, partition, floats);
        case KVFormat::E4M3:
            return attend_with<Fp8Weights<E4M3>>(args, tile, partition, floats);
        case KVFormat::E5M2:
            return attend_with<Fp8Weights<E5M2>>(args, tile, partition, floats);
    }
}

void merge(const AttentionArgs& args, const QueryTile& tile, std::byte* scratch) {
    const int64_t dim = args.kv.head_dim;
    const int64_t rows = tile.num_tokens * args.group();
    const int64_t step = state_floats(rows, dim);
    auto* floats = reinterpret_cast<float*>(scratch);
    std::copy_n(tile.partials, step, floats);
    const State total(floats, rows, dim);
    for (int64_t p = 1; p < tile.end_partition - tile.first_partition; ++p) {
        join(total, State(tile.partials + p * step, rows, dim), rows, dim);
    }
    write(args, tile, total);
}

}  // namespace octavo::cpu::OCTAVO_ISA
