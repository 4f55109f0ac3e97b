// Linear layers whose weights are integers with scales, in any of the formats; part of linear.
//
// A row of activations is quantised once, by groups of 32 columns as the weights are. Then an
// output element is a chain over ascending groups: fma(integer dot product, product of the two
// scales, sum), and for formats with minima one more for each of the group's minima. The integers
// are exact and each row has scales of its own, so a row does not depend on the others in the
// batch, and all instruction sets agree.
#pragma once

#include "cpu/kernels.h"

namespace octavo::cpu::OCTAVO_ISA {

int64_t quantized_scratch_bytes(const Panels& weight);
int64_t quantized_block_rows(const Panels& weight);

// Rows [begin, end) of args.src, to where they belong in `rows`; a row takes so many bytes there.
int64_t quantized_row_bytes(const LinearArgs& args);
void quantize_rows(const LinearArgs& args, int64_t begin, int64_t end, std::byte* rows);

// Of rows that are quantised already (args.quantized), or quantises them itself.
void linear_quantized(const LinearArgs& args, int64_t begin, int64_t end, std::byte* scratch);

}  // namespace octavo::cpu::OCTAVO_ISA
