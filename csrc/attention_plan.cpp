#include "attention_plan.h"

#include <algorithm>
#include <cstring>

namespace octavo {

namespace {

constexpr int64_t kItemsPerThread = 4;  // enough for even shares
constexpr int64_t kBlocksPerPartition = cpu::kPartitionTokens / cpu::kBlockTokens;

int64_t num_partitions(const cpu::QueryTile& tile) {
    return tile.end_partition - tile.first_partition;
}

// Blocks of a partition: before, after or the same as those of another sequence, in some order.
int compare_blocks(const cpu::QueryTile& a, const cpu::QueryTile& b, int64_t partition) {
    const int64_t first = partition * kBlocksPerPartition;
    return std::memcmp(a.block_table + first, b.block_table + first,
                       kBlocksPerPartition * sizeof(int32_t));
}

}  // namespace

void AttentionPlan::build(const Step& step, int64_t num_threads, float* memory,
                          int64_t max_floats) {
    tiles_.clear();
    items_.clear();
    states_.clear();
    for (int64_t seq = 0; seq < step.num_seqs(); ++seq) {
        add_tiles(step, seq);
    }
    find_common();
    choose_split(num_threads, max_floats);
    place_states(memory);
}

cpu::NextKeys AttentionPlan::first_keys(const cpu::AttendItem& item) const {
    const cpu::QueryTile& tile = tiles_[static_cast<size_t>(item.tile)];
    const int64_t first = item.partition * cpu::kPartitionTokens;
    const int64_t count = std::min(cpu::kSoftmaxTokens, tile.end_position - first);
    return {tile.block_table + first / cpu::kBlockTokens,
            (count + cpu::kBlockTokens - 1) / cpu::kBlockTokens, tile.kv_head};
}

void AttentionPlan::add_tiles(const Step& step, int64_t seq) {
    const auto at = static_cast<size_t>(seq);
    const std::span<const int32_t> starts = step.segment_starts;
    if (!shape_.is_segmented || starts.empty()) {
        add_tiles_of(step, seq, {step.seq_starts[at], step.seq_starts[at + 1]}, false);
        return;
    }
    for (size_t i = 0; i + 1 < starts.size(); ++i) {
        add_tiles_of(step, seq, {starts[i], starts[i + 1]}, true);
    }
}

// A segment is of a sequence that is whole in the step, and alone there.
void AttentionPlan::add_tiles_of(const Step& step, int64_t seq, Tokens tokens, bool is_segment) {
    const auto at = static_cast<size_t>(seq);
    const int64_t end = tokens.end;
    const int64_t first = is_segment ? tokens.begin : 0;
    const int64_t wanted = cpu::query_tile_tokens(shape_.num_heads / shape_.num_kv_heads);
    for (int64_t token = tokens.begin; token < end; token += wanted) {
        const int64_t count = std::min(wanted, end - token);
        const int64_t position = step.positions[static_cast<size_t>(token)];
        const int64_t seen_from =
            std::max(first, cpu::first_seen(position, shape_.window, shape_.is_chunked));
        const bool is_cross = shape_.cross_length > 0;
        const int64_t own = is_segment ? end : step.seq_lens[at];
        const int64_t length = is_cross ? shape_.cross_length : own;
        int64_t seen_to = position + count;  // by the last token
        if (!step.seen_to.empty()) {
            const int64_t later = step.seen_to[static_cast<size_t>(token + count - 1)];
            seen_to = std::max(seen_to, later);
        }
        if (!shape_.is_causal) {
            seen_to = shape_.window > 0 ? std::min(length, seen_to - 1 + shape_.window) : length;
        }
        for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
            tiles_.push_back({
                .block_table =
                    is_cross ? step.cross_table(seq) : step.block_table(shape_.group, seq),
                .tokens = nullptr,
                .first_token = static_cast<int32_t>(token),
                .num_tokens = static_cast<int32_t>(count),
                .first_position = static_cast<int32_t>(position),
                .begin_position = static_cast<int32_t>(first),
                .end_position = static_cast<int32_t>(length),
                .kv_head = static_cast<int32_t>(head),
                .first_partition = static_cast<int32_t>(seen_from / cpu::kPartitionTokens),
                .end_partition = static_cast<int32_t>((seen_to - 1) / cpu::kPartitionTokens + 1),
                .states = nullptr,
            });
        }
    }
}

// Prompts have rows enough of their own for each key that is read: only tiles with few tokens
// share. A window would hide part of a partition from some of them.
void AttentionPlan::find_common() {
    common_.clear();
    if (!shape_.is_causal || shape_.window > 0 || shape_.cross_length > 0) {
        return;
    }
    const int64_t wanted = cpu::query_tile_tokens(shape_.num_heads / shape_.num_kv_heads);
    std::vector<int32_t> first_tiles;
    for (size_t i = 0; i < tiles_.size(); i += static_cast<size_t>(shape_.num_kv_heads)) {
        if (2 * tiles_[i].num_tokens <= wanted) {
            first_tiles.push_back(static_cast<int32_t>(i));
        }
    }
    find_common_from(0, std::move(first_tiles));
}

void AttentionPlan::find_common_from(int64_t partition, std::vector<int32_t> first_tiles) {
    const auto tile = [&](int32_t i) -> const cpu::QueryTile& {
        return tiles_[static_cast<size_t>(i)];
    };
    std::erase_if(first_tiles, [&](int32_t i) {
        return (partition + 1) * cpu::kPartitionTokens > tile(i).first_position + 1;
    });
    std::ranges::sort(first_tiles, [&](int32_t a, int32_t b) {
        const int order = compare_blocks(tile(a), tile(b), partition);
        return order != 0 ? order < 0 : a < b;
    });
    for (size_t begin = 0; begin < first_tiles.size();) {
        size_t end = begin + 1;
        while (end < first_tiles.size() &&
               compare_blocks(tile(first_tiles[begin]), tile(first_tiles[end]), partition) == 0) {
            ++end;
        }
        if (end - begin > 1) {
            std::vector<int32_t> same(first_tiles.begin() + static_cast<int64_t>(begin),
                                      first_tiles.begin() + static_cast<int64_t>(end));
            common_.push_back({partition, same});
            find_common_from(partition + 1, std::move(same));
        }
        begin = end;
    }
}

// Which tiles are computed partition by partition and merged: all where threads would else be idle,
// and those that have partitions in common with others.
void AttentionPlan::choose_split(int64_t num_threads, int64_t max_floats) {
    const bool is_idle =
        num_threads > 1 && static_cast<int64_t>(tiles_.size()) < kItemsPerThread * num_threads;
    is_split_.assign(tiles_.size(), 0);
    for (size_t i = 0; i < tiles_.size(); ++i) {
        is_split_[i] = static_cast<char>(is_idle && num_partitions(tiles_[i]) > 1);
    }
    const std::vector<char> alone = is_split_;
    for (const Common& common : common_) {
        for (const int32_t first : common.first_tiles) {
            std::fill_n(is_split_.begin() + first, shape_.num_kv_heads, char{1});
        }
    }
    if (!common_.empty() && !fits(max_floats)) {
        common_.clear();
        is_split_ = alone;
    }
    if (!fits(max_floats)) {
        is_split_.assign(tiles_.size(), 0);
    }
}

bool AttentionPlan::fits(int64_t max_floats) const {
    int64_t floats = 0;
    for (size_t i = 0; i < tiles_.size(); ++i) {
        if (is_split_[i] != 0) {
            floats += num_partitions(tiles_[i]) *
                      cpu::state_floats(rows_of(tiles_[i].num_tokens), shape_.head_dim);
        }
    }
    return floats <= max_floats;
}

int64_t AttentionPlan::rows_of(int64_t num_tokens) const {
    return num_tokens * (shape_.num_heads / shape_.num_kv_heads);
}

// Gives each partition of a split tile its state, and makes the items: shared ones first, as they
// are the longest.
void AttentionPlan::place_states(float* memory) {
    const size_t num_own = tiles_.size();
    size_t num_states = 0;
    for (size_t i = 0; i < num_own; ++i) {
        num_states += is_split_[i] != 0 ? static_cast<size_t>(num_partitions(tiles_[i])) : 0;
    }
    states_.reserve(2 * num_states);  // no more are shared than there are, and none may move
    states_.resize(num_states);
    const cpu::SoftmaxState* next = states_.data();
    for (size_t i = 0; i < num_own; ++i) {
        if (is_split_[i] != 0) {
            tiles_[i].states = next;
            next += num_partitions(tiles_[i]);
        }
    }
    shared_tokens_.clear();
    shared_tokens_.reserve(num_states * cpu::kTileRowsWanted);
    for (const Common& common : common_) {
        memory = place_common(common, memory);
    }
    for (size_t i = 0; i < num_own; ++i) {
        const cpu::QueryTile& tile = tiles_[i];
        if (tile.states == nullptr) {
            items_.push_back({static_cast<int32_t>(i), tile.first_partition});
            continue;
        }
        const int64_t rows = rows_of(tile.num_tokens);
        for (int32_t p = tile.first_partition; p < tile.end_partition; ++p) {
            cpu::SoftmaxState& state = state_of(tile, p);
            if (state.values == nullptr) {
                state = cpu::SoftmaxState(memory, rows, shape_.head_dim);
                memory += cpu::state_floats(rows, shape_.head_dim);
                items_.push_back({static_cast<int32_t>(i), p});
            }
        }
    }
}

// Tiles of the rows of several sequences; each sequence's state of the partition is a part of
// theirs. Returns the memory behind.
float* AttentionPlan::place_common(const Common& common, float* memory) {
    const int64_t wanted = cpu::query_tile_tokens(shape_.num_heads / shape_.num_kv_heads);
    const auto& members = common.first_tiles;
    for (size_t begin = 0, end = 0; begin < members.size(); begin = end) {
        const int32_t* const tokens = shared_tokens_.data() + shared_tokens_.size();
        int64_t count = 0;
        for (; end < members.size(); ++end) {
            const cpu::QueryTile& own = tiles_[static_cast<size_t>(members[end])];
            if (count + own.num_tokens > wanted) {
                break;
            }
            for (int32_t i = 0; i < own.num_tokens; ++i) {
                shared_tokens_.push_back(own.first_token + i);
            }
            count += own.num_tokens;
        }
        const int64_t rows = rows_of(count);
        for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
            states_.emplace_back(memory, rows, shape_.head_dim);
            memory += cpu::state_floats(rows, shape_.head_dim);
            int64_t row = 0;
            for (size_t i = begin; i < end; ++i) {
                const cpu::QueryTile& own = tiles_[static_cast<size_t>(members[i] + head)];
                state_of(own, common.partition) = states_.back().rows_from(row, shape_.head_dim);
                row += rows_of(own.num_tokens);
            }
            add_shared_tile(tiles_[static_cast<size_t>(members[begin] + head)], common.partition,
                            {tokens, static_cast<size_t>(count)});
        }
    }
    return memory;
}

void AttentionPlan::add_shared_tile(cpu::QueryTile tile, int64_t partition,
                                    std::span<const int32_t> tokens) {
    tile.tokens = tokens.data();
    tile.num_tokens = static_cast<int32_t>(tokens.size());
    tile.first_position = static_cast<int32_t>((partition + 1) * cpu::kPartitionTokens);  // behind
    tile.first_partition = static_cast<int32_t>(partition);
    tile.end_partition = static_cast<int32_t>(partition + 1);
    tile.states = &states_.back();
    items_.push_back({static_cast<int32_t>(tiles_.size()), tile.first_partition});
    tiles_.push_back(tile);
}

cpu::SoftmaxState& AttentionPlan::state_of(const cpu::QueryTile& tile, int64_t partition) {
    const auto first = static_cast<size_t>(tile.states - states_.data());
    return states_[first + static_cast<size_t>(partition - tile.first_partition)];
}

}  // namespace octavo
