// For a query row the result is always the same sum: within a partition of 512 positions, tiles of
// 128 in ascending order by online softmax; partitions joined in ascending order by one formula.
// What a row may not see (later tokens, tokens before its window, memory behind the sequence's end)
// is not merely weighted with zero: it is never multiplied, for it may hold NaN.
#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/range.h"
#include "cpu/dot.h"
#include "cpu/softmax_state.h"
#ifdef __AMX_BF16__
#include "cpu/attention_tiles.h"
#endif

namespace octavo::cpu::OCTAVO_ISA {
namespace {

constexpr int64_t kBlocksPerTile = kSoftmaxTokens / kBlockTokens;

#if defined(__AMX_BF16__)
struct Bf16Tiles : Bf16Pairs {
    static constexpr int64_t kHeight = kTileHeight;
};
using KVPairs = Bf16Tiles;
#elif defined(__AVX512BF16__)
using KVPairs = Bf16Pairs;
#else
using KVPairs = Bf16Weights;
#endif

void scale_row(float* values, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
        store(values + i, load(values + i) * broadcast(factor));
    }
}

// Columns of a latent tile's values that are made at a time where few rows meet them: they stay in
// the first cache.
constexpr int64_t kTurnedColumns = 64;

// V panels from K panels of a latent block: once for all heads and rows of a tile, so that the
// cache need not hold, and memory not bring, the same numbers twice.
template <int64_t kElementBytes>
void turn_panels(const std::byte* keys, std::byte* values, int64_t columns) {
    constexpr int64_t kPanelBytes = kBlockTokens * kBlockTokens * kElementBytes;
    for (int64_t c = 0; c < columns; c += kBlockTokens) {
        if constexpr (kElementBytes == 2) {
            // Two tokens' pairs of columns are 8 bytes, and become two columns' pairs of tokens.
            const auto* from = reinterpret_cast<const uint64_t*>(keys);
            auto* to = reinterpret_cast<uint64_t*>(values);
            for (int64_t pair = 0; pair < 8; ++pair) {
                for (int64_t columns = 0; columns < 8; ++columns) {
                    const uint64_t x = from[columns * 8 + pair];
                    to[pair * 8 + columns] = (x & 0xffff00000000ffffU) | (x >> 16 & 0xffff0000U) |
                                             (x & 0xffff0000U) << 16;
                }
            }
        } else {
            static_assert(kElementBytes == 4);
            const auto* from = reinterpret_cast<const uint32_t*>(keys);
            auto* to = reinterpret_cast<uint32_t*>(values);
            for (int64_t t = 0; t < kBlockTokens; ++t) {
                for (int64_t d = 0; d < kBlockTokens; ++d) {
                    to[t * kBlockTokens + d] = from[d * kBlockTokens + t];
                }
            }
        }
        keys += kPanelBytes;
        values += kPanelBytes;
    }
}

template <class Weights>
class Attend {
  public:
    // `turned`: where a latent layer's values go while a tile is under way.
    Attend(const AttentionArgs& args, const QueryTile& tile, const NextKeys& next, float* scores,
           std::byte* turned)
        : args_(args),
          tile_(tile),
          next_(next),
          dim_(args.kv.head_dim),
          value_dim_(args.kv.value_dim()),
          group_(args.group()),
          num_rows_(tile.num_tokens * group_),
          turned_columns_(num_rows_ <= kRowsAtOnce ? std::min(kTurnedColumns, args.kv.value_dim())
                                                   : args.kv.value_dim()),
          num_passes_(2 * ((num_rows_ + kRowsAtOnce - 1) / kRowsAtOnce)),
          panels_bytes_(args.kv.panels_bytes()),
          scores_(scores),
          rounded_queries_(reinterpret_cast<uint16_t*>(scores + num_rows_ * kSoftmaxTokens)),
          turned_(turned) {
        if constexpr (kIsPairs) {
            round_queries();
        }
    }

    ~Attend() {
#ifdef __AMX_BF16__
        if constexpr (kIsTiles) {
            _tile_release();
        }
#endif
    }

    void partition(int64_t index, const State& state) {
        std::fill_n(state.values, num_rows_ * dim_, 0.0F);
        std::fill_n(state.maximum, num_rows_, -INFINITY);
        std::fill_n(state.sum, num_rows_, 0.0F);
        const int64_t end = std::min((index + 1) * kPartitionTokens, seen(last_token()).end);
        // Another thread may compute the next partition of a context that is split.
        fetch_end_ = tile_.states == nullptr ? seen(last_token()).end : end;
        for (start_ = index * kPartitionTokens; start_ < end; start_ += kSoftmaxTokens) {
            if (seen(0).begin < start_ + kSoftmaxTokens) {
                compute_tile(state);
            }
        }
    }

  private:
    static constexpr bool kIsScaled = requires { Weights::kUnit; };
    // Queries and weights are rounded to bf16, and two of their products added at a time.
    static constexpr bool kIsPairs = Weights::kXs < Weights::kColumns;
    // They are multiplied tile by tile.
    static constexpr bool kIsTiles = requires { Weights::kHeight; };
    static constexpr int64_t kRowsAtOnce = [] {
        if constexpr (kIsTiles) {
            return Weights::kHeight;
        } else {
            return int64_t{kTileRows};
        }
    }();
    static constexpr int64_t kStepsPerBlock = kBlockTokens / Weights::kColumns;
    static constexpr int64_t kElementBytes = Weights::kStepBytes / (Weights::kColumns * kLanes);

    // 8 bits hold no latent vectors.
    int64_t turned_block_bytes() const { return turned_columns_ * kBlockTokens * kElementBytes; }
    bool is_latent() const { return !kIsScaled && args_.kv.is_latent(); }

    int64_t last_token() const { return tile_.num_tokens - 1; }

    // Positions that the tile's tokens see.
    Range seen(int64_t token) const {
        const int64_t behind = tile_.first_position + token + 1;
        const int64_t begin = first_seen(behind - 1, args_.window, args_.is_chunked);
        if (args_.is_causal) {
            // Tokens of a shared tile see all of its partition, and so as much as they may see.
            const bool has_more = args_.seen_to != nullptr && !tile_.is_shared();
            const int64_t more = has_more ? args_.seen_to[tile_.first_token + token] : 0;
            return {begin, std::max(behind, more)};
        }
        const int64_t end = tile_.end_position;
        if (tile_.begin_position > 0) {
            return {tile_.begin_position, end};
        }
        return {begin, args_.window > 0 ? std::min<int64_t>(end, behind - 1 + args_.window) : end};
    }

    int64_t token_of(int64_t r) const {
        const int64_t index = r / group_;
        return tile_.is_shared() ? tile_.tokens[index] : tile_.first_token + index;
    }

    int64_t position_of(int64_t r) const {
        return tile_.is_shared() ? args_.positions[token_of(r)] : tile_.first_position + r / group_;
    }

    const float* query(int64_t r) const {
        const int64_t row = token_of(r) * args_.num_heads;
        return args_.q + (row + tile_.kv_head * group_ + r % group_) * dim_;
    }

    void round_queries() {
        for (int64_t r = 0; r < num_rows_; ++r) {
            const float* from = query(r);
            for (int64_t i = 0; i < dim_; i += kLanes) {
                store_bf16(rounded_queries_ + r * dim_ + i, load(from + i));
            }
        }
    }

    // Some neighbouring rows that go together.
    struct Rows {
        int64_t first;
        int64_t count;
        const void* queries[kRowsAtOnce];
        Range seen[kRowsAtOnce];  // within the tile under way; may be empty

        // Rows of later tokens see further: the last row ends last, the first begins first.
        Range seen_by_any() const { return {seen[0].begin, seen[count - 1].end}; }
        Range seen_by_all() const { return {seen[count - 1].begin, seen[0].end}; }
    };

    Rows rows_from(int64_t first) const {
        Rows rows{};
        rows.first = first;
        rows.count = std::min<int64_t>(kRowsAtOnce, num_rows_ - first);
        for (int64_t i = 0; i < rows.count; ++i) {
            const int64_t r = first + i;
            rows.queries[i] = kIsPairs ? static_cast<const void*>(rounded_queries_ + r * dim_)
                                       : static_cast<const void*>(query(r));
            const Range range = seen(r / group_);
            rows.seen[i] = {std::max<int64_t>(0, range.begin - start_),
                            std::min<int64_t>(kSoftmaxTokens, range.end - start_)};
        }
        return rows;
    }

    // Where the blocks of the tile under way lie, as far as any row sees them, and what comes
    // after. Blocks lie anywhere, so the hardware cannot guess the next one: ahead_of_keys() and
    // ahead_of_values() are fetched meanwhile.
    void find_blocks() {
        const int64_t begin = std::max<int64_t>(0, seen(0).begin - start_) / kBlockTokens;
        const int64_t end = std::min<int64_t>(kSoftmaxTokens, seen(last_token()).end - start_);
        for (int64_t b = begin; b * kBlockTokens < end; ++b) {
            const int64_t index = start_ / kBlockTokens + b;
            keys_[b] = args_.kv.keys(tile_.block_table[index], tile_.kv_head);
            values_[b] =
                is_latent() ? turned_ + b * turned_block_bytes() : keys_[b] + panels_bytes_;
            after_values_[b] = is_latent() ? keys_[b] : values_[b];
            const int64_t next = index + kBlocksPerTile;
            if (next * kBlockTokens < fetch_end_) {
                after_values_[b] = args_.kv.keys(tile_.block_table[next], tile_.kv_head);
                if constexpr (kIsScaled) {
                    prefetch(after_values_[b] + 2 * panels_bytes_);
                }
            } else if (b < next_.num_blocks) {
                after_values_[b] = args_.kv.keys(next_.blocks[b], next_.kv_head);
            }
        }
    }

    // What is fetched while blocks are read: from `offset` of those at the same places on, so many
    // bytes a step.
    struct Ahead {
        const std::byte* const* blocks;
        int64_t offset;
        int64_t step_bytes;
    };

    // While keys are read, their values are fetched, and while those are added up, the keys of the
    // next tile: by the first rows, as the others find both in a cache. Latent values come from
    // keys, and are there: of the next keys each pass fetches its part, so that memory is busy all
    // the while.
    Ahead ahead_of_keys(const Rows& rows) const {
        if (is_latent()) {
            return part_of_next(2 * (rows.first / kRowsAtOnce), dim_);
        }
        return {rows.first == 0 ? values_ : keys_, 0, Weights::kStepBytes};
    }
    Ahead ahead_of_values(const Rows& rows) const {
        if (is_latent()) {
            return part_of_next(2 * (rows.first / kRowsAtOnce) + 1, value_dim_);
        }
        return {rows.first == 0 ? after_values_ : values_, 0, Weights::kStepBytes};
    }
    Ahead part_of_next(int64_t pass, int64_t columns) const {
        const int64_t part = panels_bytes_ / num_passes_;
        return {after_values_, pass * part, part / (columns / Weights::kColumns)};
    }

    static int64_t value_offset(int64_t column) {
        return column * kStepsPerBlock * Weights::kStepBytes / kLanes;
    }
    const std::byte* values(int64_t index_in_tile, int64_t column) const {
        return values_[index_in_tile] + value_offset(column - first_column_);
    }
    // Of a block's tokens. They go into scores and weights, once for each token, not for each
    // column.
    Vec key_scales(int64_t index_in_tile) const { return scales(index_in_tile, 0); }
    Vec value_scales(int64_t index_in_tile) const { return scales(index_in_tile, kBlockTokens); }
    Vec scales(int64_t index_in_tile, int64_t first) const {
        const std::byte* from = keys_[index_in_tile] + 2 * panels_bytes_;
        return load_bf16(reinterpret_cast<const uint16_t*>(from) + first) *
               broadcast(Weights::kUnit);
    }

    float* scores(int64_t r) const { return scores_ + r * kSoftmaxTokens; }

    // What the row's values are weighted with; where they are pairs, over the scores they come
    // from.
    const void* weights(int64_t r, int64_t first) const {
        if constexpr (kIsPairs) {
            return reinterpret_cast<const uint16_t*>(scores(r)) + first;
        } else {
            return scores(r) + first;
        }
    }

    void compute_tile(const State& state) {
        find_blocks();
        for (int64_t r = 0; r < num_rows_; r += kRowsAtOnce) {
            const Rows rows = rows_from(r);
            if (!rows.seen_by_any().is_empty()) {
                compute_scores(rows);
                softmax(rows, state);
                if (!is_latent()) {
                    add_values(rows, {0, value_dim_}, state);
                }
            }
        }
        if constexpr (!kIsScaled) {
            if (args_.kv.is_latent()) {
                add_latent_values(state);
            }
        }
    }

    void add_latent_values(const State& state) {
        const int64_t begin = std::max<int64_t>(0, seen(0).begin - start_) / kBlockTokens;
        const int64_t end = std::min<int64_t>(kSoftmaxTokens, seen(last_token()).end - start_);
        for (int64_t c = 0; c < value_dim_; c += turned_columns_) {
            const int64_t count = std::min(turned_columns_, value_dim_ - c);
            first_column_ = c;
            for (int64_t b = begin; b * kBlockTokens < end; ++b) {
                turn_panels<kElementBytes>(keys_[b] + value_offset(c),
                                           turned_ + b * turned_block_bytes(), count);
            }
            for (int64_t r = 0; r < num_rows_; r += kRowsAtOnce) {
                const Rows rows = rows_from(r);
                if (!rows.seen_by_any().is_empty()) {
                    add_values(rows, {c, c + count}, state);
                }
            }
        }
        first_column_ = 0;
    }

    // q · k for the blocks that any of the rows sees; lanes beyond hold anything.
    void compute_scores(const Rows& rows) const {
        const Range any = rows.seen_by_any();
        const int64_t end_block = (any.end + kBlockTokens - 1) / kBlockTokens;
        const Ahead ahead = ahead_of_keys(rows);
        if constexpr (kIsTiles) {
            compute_tiles_scores(rows, any.begin / kBlockTokens, end_block, ahead);
            return;
        }
        int width = max_panels(rows.count);
        const std::byte* fetched[kBlocksPerTile];
        for (int64_t b = any.begin / kBlockTokens; b < end_block; ++b) {
            fetched[b] = ahead.blocks[b] + ahead.offset;
        }
        for (int64_t b = any.begin / kBlockTokens; b < end_block;) {
            while (b + width > end_block) {
                width /= 2;
            }
            const int64_t segments = (end_block - b) / width;
            kProducts.get(rows.count, width)(rows.queries, keys_ + b, fetched + b, ahead.step_bytes,
                                             segments, dim_ / Weights::kColumns,
                                             scores(rows.first) + b * kLanes, kSoftmaxTokens);
            b += segments * width;
        }
    }

    // Turns scores into weights, times the scales of V, and brings the rows' states to their new
    // maxima. One step for all rows, then the next, so that none waits for another's maximum.
    void softmax(const Rows& rows, const State& state) const {
        float highest[kRowsAtOnce];
        for (int64_t i = 0; i < rows.count; ++i) {
            highest[i] = scale_scores(rows.first + i, rows.seen[i]);
        }
        for (int64_t i = 0; i < rows.count; ++i) {
            if (!rows.seen[i].is_empty()) {
                add_weights(rows.first + i, rows.seen[i], highest[i], state);
            }
            if constexpr (kIsTiles) {
                clear_weights(rows.first + i, rows.seen[i], rows.seen_by_any());
            }
        }
    }

    // From the row's token to the 16 that begin at column i of the tile: none or negative.
    Vec distance(int64_t r, int64_t i) const {
        alignas(64) static constexpr float kOwn[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                           8, 9, 10, 11, 12, 13, 14, 15};
        const int64_t first = start_ + i - position_of(r);
        return broadcast(static_cast<float>(first)) + load(kOwn);
    }

    // The highest score of those that the row sees.
    float scale_scores(int64_t r, Range seen) const {
        float* s = scores(r);
        const float soft_cap = args_.soft_cap;
        const Vec scale = broadcast(args_.scale);
        const Vec cap = broadcast(soft_cap);
        const Vec nothing = broadcast(-INFINITY);
        const int64_t head = tile_.kv_head * group_ + r % group_;
        const Vec slope = broadcast(args_.alibi == nullptr ? 0.0F : args_.alibi[head]);
        Vec highest = nothing;
        for (int64_t i = seen.begin / kLanes * kLanes; i < seen.end; i += kLanes) {
            Vec score = load(s + i);
            if constexpr (kIsScaled) {
                score = score * key_scales(i / kBlockTokens);
            }
            score = score * scale;
            if (soft_cap > 0) {
                score = cap * tanh(score / cap);
            }
            if (args_.alibi != nullptr) {
                score = fma(slope, distance(r, i), score);
            }
            store(s + i, score);
            if (!all_lanes(i, seen)) {
                score = select(lanes_between(seen.begin - i, seen.end - i), score, nothing);
            }
            highest = max(highest, score);
        }
        return reduce_max(highest);
    }

    void add_weights(int64_t r, Range seen, float highest, const State& state) const {
        float* s = scores(r);
        const float before = state.maximum[r];
        const float now = std::max(before, highest);
        const Vec maximum = broadcast(now);
        Vec sum = broadcast(0.0F);
        int64_t i = seen.begin / kLanes * kLanes;
        while (i < seen.end) {
            if (seen.begin <= i && i + 2 * kLanes <= seen.end) {
                const Two weights = exp(Two{load(s + i), load(s + i + kLanes)} - maximum);
                sum = sum + weights.first;
                sum = sum + weights.second;
                store_weights(s, i, weights.first);
                store_weights(s, i + kLanes, weights.second);
                i += 2 * kLanes;
                continue;
            }
            Vec weight = exp(load(s + i) - maximum);
            if (!all_lanes(i, seen)) {
                const Mask mask = lanes_between(seen.begin - i, seen.end - i);
                weight = select(mask, weight, broadcast(0.0F));
            }
            sum = sum + weight;
            store_weights(s, i, weight);
            i += kLanes;
        }
        state.maximum[r] = now;
        if (state.sum[r] == 0.0F) {
            state.sum[r] = reduce_add(sum);
        } else if (before == now) {
            state.sum[r] += reduce_add(sum);
        } else {
            const float factor = exp_of(before - now);
            state.sum[r] = std::fma(state.sum[r], factor, reduce_add(sum));
            scale_row(state.values + r * dim_, factor, dim_);
        }
    }

    void store_weights(float* s, int64_t i, Vec weights) const {
        if constexpr (kIsScaled) {
            weights = weights * value_scales(i / kBlockTokens);
        }
        if constexpr (kIsPairs) {  // never ahead of the scores that are still to be read
            store_bf16(reinterpret_cast<uint16_t*>(s) + i, weights);
        } else {
            store(s + i, weights);
        }
    }

    static bool all_lanes(int64_t i, Range seen) {
        return seen.begin <= i && i + kLanes <= seen.end;
    }

    // values += weights · V, of some columns: tokens that all rows see together, what is left row
    // by row. Either way a row's sum runs over its tokens in ascending order.
    void add_values(const Rows& rows, Range columns, const State& state) const {
        if constexpr (kIsTiles) {
            add_tiles_values(rows, columns, state);
            return;
        }
        const Range all = rows.seen_by_all();
        const Range common{(all.begin + kBlockTokens - 1) / kBlockTokens * kBlockTokens,
                           all.end / Weights::kColumns * Weights::kColumns};
        for (int64_t i = 0; i < rows.count; ++i) {
            const Range seen = rows.seen[i];
            add_tokens(rows.first + i, common.is_empty() ? seen : Range{seen.begin, common.begin},
                       columns, state);
        }
        if (common.is_empty()) {
            return;
        }
        add_common(rows, common, columns, state);
        for (int64_t i = 0; i < rows.count; ++i) {
            add_tokens(rows.first + i, {common.end, rows.seen[i].end}, columns, state);
        }
    }

#ifdef __AMX_BF16__
    void compute_tiles_scores(const Rows& rows, int64_t first_block, int64_t end_block,
                              const Ahead& ahead) const {
        use_tiles(rows.count);
        const StridedRows<const uint16_t> queries{rounded_queries_ + rows.first * dim_, 2 * dim_};
        constexpr int64_t kMost = 4;
        for (int64_t b = first_block; b < end_block; b += kMost) {
            const int64_t count = std::min(kMost, end_block - b);
            FetchedLines fetched[kMost];
            for (int64_t i = 0; i < count; ++i) {
                fetched[i] = fetched_lines(rows, ahead, b + i);
            }
            const StridedRows<float> out{scores(rows.first) + b * kBlockTokens, 4 * kSoftmaxTokens};
            constexpr decltype(&multiply_keys<1>) kMultiply[] = {
                multiply_keys<1>, multiply_keys<2>, multiply_keys<3>, multiply_keys<4>};
            kMultiply[count - 1](queries, dim_, keys_ + b, fetched, out);
        }
    }

    // By the first rows, as the others find all in a cache; of latent blocks each pass has its
    // part.
    FetchedLines fetched_lines(const Rows& rows, const Ahead& ahead, int64_t b) const {
        const bool fetches = rows.first == 0 || is_latent();
        return {ahead.blocks[b] + ahead.offset, fetches ? ahead.step_bytes : 0};
    }

    // The processor's tiles are so high.
    void use_tiles(int64_t height) const {
        if (height_ != height) {
            set_attention_tiles(height);
            height_ = height;
        }
    }

    // Of tokens that the row does not see, in blocks that others see.
    void clear_weights(int64_t r, Range seen, Range any) const {
        auto* to = reinterpret_cast<uint16_t*>(scores(r));
        const int64_t begin = any.begin / kLanes * kLanes;
        const int64_t end = (any.end + kLanes - 1) / kLanes * kLanes;
        const int64_t first = seen.is_empty() ? end : seen.begin / kLanes * kLanes;
        const int64_t behind = seen.is_empty() ? end : (seen.end + kLanes - 1) / kLanes * kLanes;
        std::fill(to + begin, to + first, uint16_t{0});
        std::fill(to + behind, to + end, uint16_t{0});
    }

    // Blocks in ascending order: those that all rows see whole together, others one by one.
    void add_tiles_values(const Rows& rows, Range columns, const State& state) const {
        use_tiles(rows.count);
        const Range any = rows.seen_by_any();
        const Range all = rows.seen_by_all();
        const int64_t first_whole = (all.begin + kBlockTokens - 1) / kBlockTokens;
        const int64_t end_whole = std::max(first_whole, all.end / kBlockTokens);
        const int64_t end_block = (any.end + kBlockTokens - 1) / kBlockTokens;
        for (int64_t b = any.begin / kBlockTokens; b < end_block;) {
            if (first_whole <= b && b < end_whole) {
                const std::byte* from[kBlocksPerTile];
                for (int64_t i = b; i < end_whole; ++i) {
                    from[i] = values(i, columns.begin);
                }
                add_blocks(rows, b, end_whole, columns, from + b, state);
                b = end_whole;
            } else {
                add_partly_seen(rows, b, columns, state);
                ++b;
            }
        }
    }

    // Whose values' panels, from the first of these columns on, begin at `from`.
    void add_blocks(const Rows& rows, int64_t first, int64_t end, Range columns,
                    const std::byte* const* from, const State& state) const {
        const Ahead ahead = ahead_of_values(rows);
        const StridedRows<const uint16_t> of_rows{
            static_cast<const uint16_t*>(weights(rows.first, first * kBlockTokens)),
            4 * kSoftmaxTokens};
        constexpr int64_t kMost = 4;
        for (int64_t c = columns.begin; c < columns.end; c += kMost * kLanes) {
            const int64_t count = std::min(kMost, (columns.end - c) / kLanes);
            const std::byte* panels[kBlocksPerTile];
            FetchedLines fetched[kBlocksPerTile];
            for (int64_t b = first; b < end; ++b) {
                panels[b - first] = from[b - first] + value_offset(c - columns.begin);
                fetched[b - first] = fetched_lines(rows, ahead, b);
                fetched[b - first].from += c / kLanes * kStepsPerBlock * ahead.step_bytes;
            }
            constexpr decltype(&multiply_values<1>) kMultiply[] = {
                multiply_values<1>, multiply_values<2>, multiply_values<3>, multiply_values<4>};
            kMultiply[count - 1](of_rows, panels, fetched, end - first,
                                 {state.values + rows.first * dim_ + c, 4 * dim_});
        }
    }

    // A block of which a row does not see all.
    void add_partly_seen(const Rows& rows, int64_t b, Range columns, const State& state) const {
        alignas(64) std::byte seen_values[kMaxHeadDim * kBlockTokens * kElementBytes];
        const std::byte* const from[] = {seen_values};
        if (copy_seen(rows.seen_by_any(), b, columns, seen_values)) {
            add_blocks(rows, b, b + 1, columns, from, state);
            return;
        }
        // What is not finite would not vanish in rows that do not see it: each row alone.
        for (int64_t i = 0; i < rows.count; ++i) {
            if (!rows.seen[i].is_empty()) {
                copy_seen(rows.seen[i], b, columns, seen_values);
                add_block_to(rows, i, b, columns, seen_values, state);
            }
        }
    }

    bool copy_seen(Range seen, int64_t b, Range columns, std::byte* to) const {
        const int64_t first = b * kBlockTokens;
        bool is_finite = true;
        for (int64_t c = columns.begin; c < columns.end; c += kLanes) {
            is_finite = copy_tokens(values(b, c), seen.begin - first, seen.end - first,
                                    to + value_offset(c - columns.begin)) &&
                        is_finite;
        }
        return is_finite;
    }

    // To row i of those alone.
    void add_block_to(const Rows& rows, int64_t i, int64_t b, Range columns, const std::byte* from,
                      const State& state) const {
        const StridedRows<const uint16_t> of_rows{
            static_cast<const uint16_t*>(weights(rows.first, b * kBlockTokens)),
            4 * kSoftmaxTokens};
        for (int64_t c = columns.begin; c < columns.end; c += kLanes) {
            alignas(64) float sums[kTileHeight][kLanes] = {};
            float* own = state.values + (rows.first + i) * dim_ + c;
            std::copy_n(own, kLanes, sums[i]);
            const std::byte* const panel = from + value_offset(c - columns.begin);
            const FetchedLines nothing{panel, 0};
            multiply_values<1>(of_rows, &panel, &nothing, 1, {sums[0], kTileRowBytes});
            std::copy_n(sums[i], kLanes, own);
        }
    }
#endif

    // Tokens from the start of a block on.
    void add_common(const Rows& rows, Range tokens, Range columns, const State& state) const {
        const int64_t first_block = tokens.begin / kBlockTokens;
        const int64_t end_block = tokens.end / kBlockTokens;  // of the whole ones
        const int64_t steps_left = tokens.end % kBlockTokens / Weights::kColumns;
        const void* x[kRowsAtOnce];
        const void* x_left[kRowsAtOnce];
        for (int64_t i = 0; i < rows.count; ++i) {
            x[i] = weights(rows.first + i, tokens.begin);
            x_left[i] = weights(rows.first + i, end_block * kBlockTokens);
        }
        int width = max_panels(rows.count);
        const Ahead ahead = ahead_of_values(rows);
        for (int64_t c = columns.begin; c < columns.end; c += width * kLanes) {
            while (c + width * kLanes > columns.end) {
                width /= 2;
            }
            const std::byte* panels[kBlocksPerTile * kMaxPanels];
            const std::byte* fetched[kBlocksPerTile * kMaxPanels];
            int64_t count = 0;
            for (int64_t b = first_block; b < end_block + (steps_left > 0 ? 1 : 0); ++b) {
                for (int i = 0; i < width; ++i, ++count) {
                    const int64_t column = c + i * kLanes;
                    const int64_t steps = column / kLanes * kStepsPerBlock;
                    panels[count] = values(b, column);
                    fetched[count] = ahead.blocks[b] + ahead.offset + steps * ahead.step_bytes;
                }
            }
            const Dot dot = kSums.get(rows.count, width);
            float* to = state.values + rows.first * dim_ + c;
            dot(x, panels, fetched, ahead.step_bytes, end_block - first_block, kStepsPerBlock, to,
                dim_);
            if (steps_left > 0) {
                const int64_t last = count - width;
                dot(x_left, panels + last, fetched + last, ahead.step_bytes, 1, steps_left, to,
                    dim_);
            }
        }
    }

    void add_tokens(int64_t r, Range tokens, Range columns, const State& state) const {
        if constexpr (kIsPairs) {
            add_token_pairs(r, tokens, columns, state);
            return;
        }
        const float* weights = scores(r);
        for (int64_t c = columns.begin; c < columns.end && !tokens.is_empty(); c += kLanes) {
            float* to = state.values + r * dim_ + c;
            Vec sum = load(to);
            for (int64_t t = tokens.begin; t < tokens.end; ++t) {
                const std::byte* panel = values(t / kBlockTokens, c);
                sum = fma(broadcast(weights[t]), token_values(panel, t % kBlockTokens), sum);
            }
            store(to, sum);
        }
    }

    // Pairs lie at even places, as they do for rows that go together; of one that the row sees only
    // half of, the other half is nothing.
    void add_token_pairs(int64_t r, Range tokens, Range columns, const State& state) const {
        for (int64_t c = columns.begin; c < columns.end && !tokens.is_empty(); c += kLanes) {
            float* to = state.values + r * dim_ + c;
            Vec sum = load(to);
            for (int64_t t = tokens.begin / 2 * 2; t < tokens.end; t += 2) {
                const uint32_t halves =
                    (t < tokens.begin ? 0U : 0xffffU) | (t + 1 < tokens.end ? 0xffff0000U : 0U);
                uint32_t pair = 0;
                std::memcpy(&pair, weights(r, t), sizeof(pair));
                const std::byte* of_values =
                    values(t / kBlockTokens, c) + t % kBlockTokens / 2 * Weights::kStepBytes;
                sum = Weights::add(sum, pair & halves, Weights::column_bits(of_values, halves));
            }
            store(to, sum);
        }
    }

    static Vec token_values(const std::byte* panel, int64_t token) {
        return Weights::column(panel + token / Weights::kColumns * Weights::kStepBytes,
                               static_cast<int>(token % Weights::kColumns));
    }

    static constexpr DotTable<Weights, Sums::Own> kProducts{};
    static constexpr DotTable<Weights, Sums::Joined> kSums{};

    const AttentionArgs& args_;
    const QueryTile& tile_;
    const NextKeys& next_;
    const int64_t dim_;
    const int64_t value_dim_;
    const int64_t group_;
    const int64_t num_rows_;
    const int64_t turned_columns_;     // of latent values at a time
    const int64_t num_passes_;         // over a tile's keys and values
    const int64_t panels_bytes_;       // of a block's K, and of its V
    float* const scores_;              // [rows, kSoftmaxTokens]
    uint16_t* const rounded_queries_;  // [rows, head_dim], of pairs only
    std::byte* const turned_;  // V panels of the tile's blocks, if latent, from first_column_ on
    const std::byte* keys_[kBlocksPerTile] = {};  // of the blocks of the tile under way
    const std::byte* values_[kBlocksPerTile] = {};
    const std::byte* after_values_[kBlocksPerTile] = {};  // what to fetch while values are read
    int64_t first_column_ = 0;                            // of values_
    int64_t start_ = 0;                                   // position where it starts
    int64_t fetch_end_ = 0;       // blocks that start before it are wanted by this thread
    mutable int64_t height_ = 0;  // of the processor's tiles
};

// Scores of a row, and its query in bf16.
constexpr int64_t row_floats(int64_t head_dim) { return kSoftmaxTokens + head_dim / 2; }

template <class Weights>
void attend_with(const AttentionArgs& args, const QueryTile& tile, int64_t partition,
                 const NextKeys& next, float* scratch) {
    const int64_t dim = args.kv.head_dim;
    const int64_t rows = tile.num_tokens * args.group();
    const int64_t most_rows = query_tile_rows(args.group());
    float* const turned = scratch + most_rows * row_floats(dim) + 2 * state_floats(most_rows, dim);
    Attend<Weights> work(args, tile, next, scratch, reinterpret_cast<std::byte*>(turned));
    scratch += most_rows * row_floats(dim);
    if (tile.states != nullptr) {
        work.partition(partition, tile.states[partition - tile.first_partition]);
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

int64_t attend_scratch_bytes(int64_t group, int64_t head_dim, int64_t latent_rank) {
    const int64_t rows = query_tile_rows(group);
    return (rows * row_floats(head_dim) + 2 * state_floats(rows, head_dim)) * 4 +
           latent_rank * kSoftmaxTokens * 4;
}

void attend(const AttentionArgs& args, const QueryTile& tile, int64_t partition,
            const NextKeys& next, std::byte* scratch) {
    auto* floats = reinterpret_cast<float*>(scratch);
    switch (args.kv.format) {
        case KVFormat::F32:
            return attend_with<F32Weights>(args, tile, partition, next, floats);
        case KVFormat::BF16:
            return attend_with<KVPairs>(args, tile, partition, next, floats);
        case KVFormat::Int8:
            return attend_with<Int8Weights>(args, tile, partition, next, floats);
        case KVFormat::E4M3:
            return attend_with<Fp8Weights<E4M3>>(args, tile, partition, next, floats);
        case KVFormat::E5M2:
            return attend_with<Fp8Weights<E5M2>>(args, tile, partition, next, floats);
    }
}

void merge(const AttentionArgs& args, const QueryTile& tile, std::byte* scratch) {
    const int64_t dim = args.kv.head_dim;
    const int64_t rows = tile.num_tokens * args.group();
    const State total(reinterpret_cast<float*>(scratch), rows, dim);
    const State& first = tile.states[0];
    std::copy_n(first.values, rows * dim, total.values);
    std::copy_n(first.maximum, rows, total.maximum);
    std::copy_n(first.sum, rows, total.sum);
    for (int64_t p = 1; p < tile.end_partition - tile.first_partition; ++p) {
        join(total, tile.states[p], rows, dim);
    }
    write(args, tile, total);
}

}  // namespace octavo::cpu::OCTAVO_ISA
