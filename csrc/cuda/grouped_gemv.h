// Products of one to four rows with weights of 4 and 8 bits in groups. Knows no torch.
#pragma once

#include <cstdint>

namespace octavo {

enum class Number : int { float32, float16, bfloat16 };

constexpr int MAX_GEMV_ROWS = 4;

// out = x · (q * scale + minimum)ᵀ + bias; the weight is a `packed.GroupedWeight`.
struct GroupedGemv {
    void* out;               // [rows, outputs]
    const void* x;           // [rows, inputs]
    const uint8_t* packed;   // [outputs, inputs * bits / 8]
    const uint16_t* scales;  // float16 [outputs, inputs / group_size]
    const uint16_t* minima;  // the same, or null: then 4 bits are less 8
    const void* bias;        // [outputs] as x, or null
    Number number;           // of x and bias
    bool is_wide;            // out is float32, otherwise as x
    int num_rows, num_outputs, num_inputs, group_size, half, bits;
};

// On a device: on this stream, without waiting. On a host: at once. False: no such kernel.
bool run_grouped_gemv(const GroupedGemv& work, void* stream);

}  // namespace octavo
