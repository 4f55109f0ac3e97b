// Stored number formats and how their bytes become float: safetensors dtypes and GGUF blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace octavo {

namespace cpu {
struct GroupRow;
}

enum class StoredType {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K
};

// The type of that name, if there is one.
std::optional<StoredType> stored_type(std::string_view name);

// Values in one block (1 for plain dtypes) and bytes that a block takes.
int64_t block_values(StoredType type);
int64_t block_bytes(StoredType type);

// Turns `count` stored values (a multiple of block_values) at `src` (any alignment) into floats.
void dequantize(StoredType type, const std::byte* src, int64_t count, float* dst);

// The integers and scales of a block of Q8_0, Q4_0 or Q4_1 as they are.
cpu::GroupRow read_group(StoredType type, const std::byte* block);

}  // namespace octavo
