// What layers with a recurrent state compute: short convolutions, the scans, norms of groups.
#pragma once

#include "cpu/kernels.h"

namespace octavo::cpu::OCTAVO_ISA {

// Units [begin, end), numbered sequence by sequence: blocks of channels, or heads. A sequence's
// tokens are computed one after the other, so how they are cut into steps changes no bit.
void short_conv(const ConvArgs& args, int64_t begin, int64_t end);
void ssd_scan(const SsdArgs& args, int64_t begin, int64_t end);
void delta_rule(const DeltaArgs& args, int64_t begin, int64_t end);
void selective_scan(const SelectiveArgs& args, int64_t begin, int64_t end);

// Rows [begin, end).
void group_norm(const GroupNormArgs& args, int64_t begin, int64_t end);

}  // namespace octavo::cpu::OCTAVO_ISA
