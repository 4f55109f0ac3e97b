#include "attention_plan.h"

#include <algorithm>

namespace octavo {

namespace {

constexpr int64_t kItemsPerThread = 4;  // enough for even shares

int64_t num_partitions(const cpu::QueryTile& tile) {
    return tile.end_partition - tile.first_partition;
}

}  // namespace

void AttentionPlan::build(const Step& step, int64_t num_threads, float* partials,
                          int64_t max_floats) {
    tiles_.clear();
    items_.clear();
    has_partials_ = false;
    for (int64_t seq = 0; seq < step.num_seqs(); ++seq) {
        add_tiles(step, seq);
    }
    int64_t floats = 0;
    for (const cpu::QueryTile& tile : tiles_) {
        floats += partial_floats(tile);
    }
    const bool is_idle = static_cast<int64_t>(tiles_.size()) < kItemsPerThread * num_threads;
    if (num_threads > 1 && is_idle && floats > 0 && floats <= max_floats) {
        split_contexts(partials);
    }
    for (size_t i = 0; i < tiles_.size(); ++i) {
        const cpu::QueryTile& tile = tiles_[i];
        const int32_t count =
            tile.partials == nullptr ? 1 : tile.end_partition - tile.first_partition;
        for (int32_t p = 0; p < count; ++p) {
            items_.push_back({static_cast<int32_t>(i), tile.first_partition + p});
        }
    }
}

void AttentionPlan::add_tiles(const Step& step, int64_t seq) {
    const auto at = static_cast<size_t>(seq);
    const int64_t end = step.seq_starts[at + 1];
    const int64_t wanted = cpu::query_tile_tokens(shape_.num_heads / shape_.num_kv_heads);
    for (int64_t token = step.seq_starts[at]; token < end; token += wanted) {
        const int64_t count = std::min(wanted, end - token);
        const int64_t position = step.positions[static_cast<size_t>(token)];
        const int64_t seen_from =
            shape_.window > 0 ? std::max<int64_t>(0, position + 1 - shape_.window) : 0;
        const bool is_cross = shape_.cross_length > 0;
        const int64_t length = is_cross ? shape_.cross_length : step.seq_lens[at];
        int64_t seen_to = position + count;  // by the last token
        if (!shape_.is_causal) {
            seen_to = shape_.window > 0 ? std::min(length, seen_to - 1 + shape_.window) : length;
        }
        for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
            tiles_.push_back({
                .block_table =
                    is_cross ? step.cross_table(seq) : step.block_table(shape_.group, seq),
                .first_token = static_cast<int32_t>(token),
                .num_tokens = static_cast<int32_t>(count),
                .first_position = static_cast<int32_t>(position),
                .end_position = static_cast<int32_t>(length),
                .kv_head = static_cast<int32_t>(head),
                .first_partition = static_cast<int32_t>(seen_from / cpu::kPartitionTokens),
                .end_partition = static_cast<int32_t>((seen_to - 1) / cpu::kPartitionTokens + 1),
                .partials = nullptr,
            });
        }
    }
}

int64_t AttentionPlan::partial_floats(const cpu::QueryTile& tile) const {
    const int64_t rows = tile.num_tokens * (shape_.num_heads / shape_.num_kv_heads);
    const int64_t partitions = num_partitions(tile);
    return partitions > 1 ? partitions * cpu::state_floats(rows, shape_.head_dim) : 0;
}

void AttentionPlan::split_contexts(float* partials) {
    has_partials_ = true;
    for (cpu::QueryTile& tile : tiles_) {
        if (num_partitions(tile) > 1) {
            tile.partials = partials;
            partials += partial_floats(tile);
        }
    }
}

}  // namespace octavo
