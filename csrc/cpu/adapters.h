// What LoRA adapters add to a linear layer: dst += up · (scale * down · src), row by row.
//
// Each sum is one chain over ascending columns, then over ascending ranks behind the layer's own
// sum: a row's bits do not depend on other rows or their adapters. Rows without one are not
// touched.
#pragma once

#include "cpu/kernels.h"

namespace octavo::cpu::OCTAVO_ISA {

// What one worker needs for rows of so many columns.
int64_t shrink_scratch_bytes(int64_t cols);

// u of rows[begin … end).
void shrink(const ShrinkArgs& args, int64_t begin, int64_t end, std::byte* scratch);

// Brings what add_delta will read first, for so many units, into a cache.
void fetch_deltas(const LinearArgs& args, int64_t first_row, int64_t num_rows, int64_t unit,
                  int64_t num_units);

// Adds to sums of the layer's `num_panels` panels from `panel` on: y[row][panel][lane], whose rows
// lie `stride` floats apart, are those from row `first_row` on.
void add_delta(const LinearArgs& args, int64_t first_row, int64_t num_rows, int64_t panel,
               int64_t num_panels, float* y, int64_t stride);

}  // namespace octavo::cpu::OCTAVO_ISA
