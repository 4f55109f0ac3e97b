// Paged causal attention over the KV cache.
#pragma once

#include "cpu/kernels.h"

namespace octavo::cpu::OCTAVO_ISA {

// What one worker needs. `latent_rank` is 0 where V has panels of its own.
int64_t attend_scratch_bytes(int64_t group, int64_t head_dim, int64_t latent_rank);

// One tile against all its partitions, written to dst; or, if the tile has partials, against one.
void attend(const AttentionArgs& args, const QueryTile& tile, int64_t partition,
            const NextKeys& next, std::byte* scratch);

// Joins the partials of a tile and writes dst.
void merge(const AttentionArgs& args, const QueryTile& tile, std::byte* scratch);

}  // namespace octavo::cpu::OCTAVO_ISA
