// Before attention: each head's norm and rotation; k and v into the KV cache.
#pragma once

#include "cpu/kernels.h"

namespace octavo::cpu::OCTAVO_ISA {

// Units [begin, end) of tokens * args.head_units(): for each token its q heads, then its KV heads.
void prepare_heads(const AttentionArgs& args, int64_t begin, int64_t end);

// The same for a latent layer: units of tokens * (args.num_heads + 1).
void prepare_latents(const AttentionArgs& args, const LatentArgs& latent, int64_t begin,
                     int64_t end);

}  // namespace octavo::cpu::OCTAVO_ISA
