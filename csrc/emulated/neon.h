// NEON over SIMDe, for processors without it: as avx512.h is for AVX-512.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/arm/neon.h>

#define vdivq_f32(a, b) ((a) / (b))
#define vmlal_high_lane_s16(sum, a, b, lane) vmlal_lane_s16(sum, vget_high_s16(a), b, lane)
