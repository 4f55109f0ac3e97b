// The table of one instruction set.
#include "cpu/kernels.h"

#include "cpu/adapters.h"
#include "cpu/attention.h"
#include "cpu/elementwise.h"
#include "cpu/embed.h"
#include "cpu/heads.h"
#include "cpu/linear.h"
#include "cpu/linear_quantized.h"
#include "cpu/norm.h"
#include "cpu/pool.h"
#include "cpu/quantize.h"
#include "cpu/recurrent.h"
#include "cpu/softmax_weights.h"

#define OCTAVO_STRING(name) #name
#define OCTAVO_STRING_OF(name) OCTAVO_STRING(name)

namespace octavo::cpu::OCTAVO_ISA {

const Kernels& kernels();

const Kernels& kernels() {
    static constexpr Kernels table{
        .isa = OCTAVO_STRING_OF(OCTAVO_ISA),
        .quantize_group = quantize_group,
        .linear_scratch_bytes = linear_scratch_bytes,
        .linear_block_rows = linear_block_rows,
        .quantized_row_bytes = quantized_row_bytes,
        .quantize_rows = quantize_rows,
        .linear = linear,
        .shrink_scratch_bytes = shrink_scratch_bytes,
        .shrink = shrink,
        .rms_norm = rms_norm,
        .layer_norm = layer_norm,
        .pool = pool,
        .row_op = row_op,
        .embed = embed,
        .prepare_heads = prepare_heads,
        .prepare_latents = prepare_latents,
        .attend_scratch_bytes = attend_scratch_bytes,
        .attend = attend,
        .merge = merge,
        .short_conv = short_conv,
        .ssd_scan = ssd_scan,
        .delta_rule = delta_rule,
        .selective_scan = selective_scan,
        .group_norm = group_norm,
        .scan_row = scan_row,
        .sum_softmax_weights = sum_softmax_weights,
    };
    return table;
}

}  // namespace octavo::cpu::OCTAVO_ISA
