// Stored number formats and how their bytes become float: safetensors dtypes, GGUF blocks, and
// blocks of 32 that loaders make: F8_E4M3, a float32 and 32 of them; NVFP4, the row's float32
// factor, two scales of e4m3 and 32 codes, neighbours in a byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace octavo {

namespace cpu {
enum class Packing : uint8_t;
struct IntegerBlock;
}  // namespace cpu

enum class StoredType {
    F32,
    F16,
    BF16,
    F8_E4M3,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4
};

// The type of that name, if there is one.
std::optional<StoredType> stored_type(std::string_view name);

const char* name_of(StoredType type);

// Values in one block (1 for plain dtypes) and bytes that a block takes.
int64_t block_values(StoredType type);
int64_t block_bytes(StoredType type);

// Turns `count` stored values (a multiple of block_values) at `src` (any alignment) into floats.
void dequantize(StoredType type, const std::byte* src, int64_t count, float* dst);

// The packing that holds the type's own codes and scales; none for plain dtypes.
std::optional<cpu::Packing> packing_of(StoredType type);

// Those of one block.
void read_block(StoredType type, const std::byte* block, cpu::IntegerBlock* to);

}  // namespace octavo
