// Stored number formats. Of integer types the codes and scales are read as they are; which values
// they stand for, groups.cpp says.
#include "cpu/quants.h"

#include <bit>
#include <cassert>
#include <cstring>

#include "common/half.h"
#include "cpu/groups.h"

namespace octavo {
namespace {

using cpu::IntegerBlock;
using cpu::Packing;

constexpr int kSmall = 32;   // values in a block of the plain types
constexpr int kSuper = 256;  // values in a block of the K types

// Blocks as they lie in the file.
struct Q8_0 {
    static constexpr int kValues = kSmall;
    uint16_t d;
    int8_t q[32];
};
struct Q4_0 {
    static constexpr int kValues = kSmall;
    uint16_t d;
    uint8_t q[16];  // low nibbles: values 0-15, high: 16-31
};
struct Q4_1 {
    static constexpr int kValues = kSmall;
    uint16_t d, m;
    uint8_t q[16];
};
struct Q5_0 {
    static constexpr int kValues = kSmall;
    uint16_t d;
    uint8_t high[4];  // bit i: the fifth bit of value i
    uint8_t q[16];
};
struct Q5_1 {
    static constexpr int kValues = kSmall;
    uint16_t d, m;
    uint8_t high[4];
    uint8_t q[16];
};
struct Q2_K {
    static constexpr int kValues = kSuper;
    uint8_t scales[16];  // low nibble: scale, high: minimum, of 16 values
    uint8_t q[64];
    uint16_t d, d_min;
};
struct Q3_K {
    static constexpr int kValues = kSuper;
    uint8_t high[32];
    uint8_t q[64];
    uint8_t scales[12];  // 16 of 6 bits
    uint16_t d;
};
struct Q4_K {
    static constexpr int kValues = kSuper;
    uint16_t d, d_min;
    uint8_t scales[12];  // 8 scales and 8 minima of 6 bits
    uint8_t q[128];
};
struct Q5_K {
    static constexpr int kValues = kSuper;
    uint16_t d, d_min;
    uint8_t scales[12];
    uint8_t high[32];
    uint8_t q[128];
};
struct Q6_K {
    static constexpr int kValues = kSuper;
    uint8_t low[128];
    uint8_t high[64];
    int8_t scales[16];
    uint16_t d;
};
struct IQ4_NL {
    static constexpr int kValues = kSmall;
    uint16_t d;
    uint8_t q[16];
};
struct IQ4_XS {
    static constexpr int kValues = kSuper;
    uint16_t d;
    uint8_t scales_high[2];  // two bits each of 8 scales
    uint8_t scales_low[4];
    uint8_t q[128];
};
struct MXFP4 {
    static constexpr int kValues = kSmall;
    uint8_t exponent;
    uint8_t q[16];
};
struct NVFP4 {
    static constexpr int kValues = kSmall;
    uint8_t factor[4];
    int8_t scales[2];
    uint8_t q[16];
};
static_assert(sizeof(Q8_0) == 34 && sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20);
static_assert(sizeof(Q5_0) == 22 && sizeof(Q5_1) == 24 && sizeof(Q2_K) == 84);
static_assert(sizeof(Q3_K) == 110 && sizeof(Q4_K) == 144 && sizeof(Q5_K) == 176);
static_assert(sizeof(Q6_K) == 210 && sizeof(IQ4_NL) == 18 && sizeof(IQ4_XS) == 136);
static_assert(sizeof(MXFP4) == 17 && sizeof(NVFP4) == 22);
static_assert(std::endian::native == std::endian::little, "files are little-endian");

// Nibbles of 32 values: the low ones are the first half.
inline void read_nibbles(const uint8_t* q, uint8_t* __restrict codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = q[i] & 15;
        codes[i + 16] = q[i] >> 4;
    }
}

inline void read_fifth_bits(const uint8_t* high, uint8_t* __restrict codes) {
    uint32_t bits;
    std::memcpy(&bits, high, sizeof bits);
    for (int i = 0; i < 32; ++i) {
        codes[i] = static_cast<uint8_t>(codes[i] | (bits >> i & 1) << 4);
    }
}

void read(const Q8_0& block, IntegerBlock* to) {
    std::memcpy(to->codes, block.q, sizeof block.q);
    to->scale = block.d;
}

void read(const Q4_0& block, IntegerBlock* to) {
    read_nibbles(block.q, to->codes);
    to->scale = block.d;
}

void read(const Q4_1& block, IntegerBlock* to) {
    read_nibbles(block.q, to->codes);
    to->scale = block.d;
    to->minimum = block.m;
}

void read(const Q5_0& block, IntegerBlock* to) {
    read_nibbles(block.q, to->codes);
    read_fifth_bits(block.high, to->codes);
    to->scale = block.d;
}

void read(const Q5_1& block, IntegerBlock* to) {
    read_nibbles(block.q, to->codes);
    read_fifth_bits(block.high, to->codes);
    to->scale = block.d;
    to->minimum = block.m;
}

void read(const IQ4_NL& block, IntegerBlock* to) {
    read_nibbles(block.q, to->codes);
    to->scale = block.d;
}

void read(const MXFP4& block, IntegerBlock* to) {
    read_nibbles(block.q, to->codes);
    to->scale = block.exponent;
}

void read(const NVFP4& block, IntegerBlock* to) {
    for (int i = 0; i < 16; ++i) {
        to->codes[2 * i] = block.q[i] & 15;
        to->codes[2 * i + 1] = block.q[i] >> 4;
    }
    std::memcpy(to->scales, block.scales, sizeof block.scales);
    std::memcpy(&to->factor, block.factor, sizeof block.factor);
    to->factor *= 0.5F;  // kFloat4 is doubled
}

// K types come in halves of 128 values; bits of values 32 apart share a byte. Their minima are
// subtracted.
constexpr uint16_t negated(uint16_t half) { return half ^ 0x8000U; }

// Two bits each of 256 values.
inline void read_two_bits(const uint8_t* q, uint8_t* __restrict codes) {
    for (int part = 0; part < 8; ++part) {
        for (int i = 0; i < 32; ++i) {
            codes[part * 32 + i] = q[part / 4 * 32 + i] >> (part % 4 * 2) & 3;
        }
    }
}

// Four bits each of 256 values.
inline void read_four_bits(const uint8_t* q, uint8_t* __restrict codes) {
    for (int part = 0; part < 8; ++part) {
        for (int i = 0; i < 32; ++i) {
            codes[part * 32 + i] = q[part / 2 * 32 + i] >> (part % 2 * 4) & 15;
        }
    }
}

void read(const Q2_K& block, IntegerBlock* to) {
    read_two_bits(block.q, to->codes);
    for (int sub = 0; sub < 16; ++sub) {
        to->scales[sub] = static_cast<int8_t>(block.scales[sub] & 15);
        to->minima[sub] = block.scales[sub] >> 4;
    }
    to->scale = block.d;
    to->minimum = negated(block.d_min);
}

void read(const Q3_K& block, IntegerBlock* to) {
    read_two_bits(block.q, to->codes);
    for (int i = 0; i < kSuper; ++i) {
        to->codes[i] = static_cast<uint8_t>(to->codes[i] | (block.high[i % 32] >> i / 32 & 1) << 2);
    }
    for (int sub = 0; sub < 16; ++sub) {
        const int low = sub < 8 ? block.scales[sub] & 15 : block.scales[sub - 8] >> 4;
        const int high = block.scales[8 + sub % 4] >> (sub / 4 * 2) & 3;
        to->scales[sub] = static_cast<int8_t>((low | high << 4) - 32);
    }
    to->scale = block.d;
}

// Eight scales and eight minima of 6 bits.
inline void read_six_bit_scales(const uint8_t* scales, IntegerBlock* to) {
    for (int sub = 0; sub < 4; ++sub) {
        const int low = scales[sub + 8];
        to->scales[sub] = static_cast<int8_t>(scales[sub] & 63);
        to->minima[sub] = scales[sub + 4] & 63;
        to->scales[sub + 4] = static_cast<int8_t>((low & 15) | (scales[sub] >> 6) << 4);
        to->minima[sub + 4] = static_cast<uint8_t>(low >> 4 | (scales[sub + 4] >> 6) << 4);
    }
}

void read(const Q4_K& block, IntegerBlock* to) {
    read_four_bits(block.q, to->codes);
    read_six_bit_scales(block.scales, to);
    to->scale = block.d;
    to->minimum = negated(block.d_min);
}

void read(const Q5_K& block, IntegerBlock* to) {
    read_four_bits(block.q, to->codes);
    for (int i = 0; i < kSuper; ++i) {
        to->codes[i] = static_cast<uint8_t>(to->codes[i] | (block.high[i % 32] >> i / 32 & 1) << 4);
    }
    read_six_bit_scales(block.scales, to);
    to->scale = block.d;
    to->minimum = negated(block.d_min);
}

void read(const Q6_K& block, IntegerBlock* to) {
    for (int part = 0; part < 8; ++part) {  // of 32 values, four to a half
        const uint8_t* low = block.low + part / 4 * 64 + part % 2 * 32;
        const uint8_t* high = block.high + part / 4 * 32;
        const int low_shift = part % 4 / 2 * 4, high_shift = part % 4 * 2;
        for (int i = 0; i < 32; ++i) {
            to->codes[part * 32 + i] =
                static_cast<uint8_t>((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4);
        }
    }
    std::memcpy(to->scales, block.scales, sizeof block.scales);
    to->scale = block.d;
}

void read(const IQ4_XS& block, IntegerBlock* to) {
    for (int part = 0; part < 8; ++part) {
        read_nibbles(block.q + part * 16, to->codes + part * 32);
        const int low = block.scales_low[part / 2] >> (part % 2 * 4) & 15;
        const int high = block.scales_high[part / 4] >> (part % 4 * 2) & 3;
        to->scales[part] = static_cast<int8_t>((low | high << 4) - 32);
    }
    to->scale = block.d;
}

template <typename Block>
void read_bytes(const std::byte* from, IntegerBlock* to) {
    Block block;
    std::memcpy(&block, from, sizeof block);
    read(block, to);
}

template <typename Convert>
void convert_16_bits(const std::byte* src, int64_t count, float* __restrict dst, Convert convert) {
    for (int64_t i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, src + i * 2, sizeof bits);
        dst[i] = convert(bits);
    }
}

// 8-bit floats with four bits of exponent and three of mantissa, no infinities, and one NaN.
struct F8_E4M3 {
    static constexpr int kValues = kSmall;
    float scale;
    uint8_t values[32];
};
static_assert(sizeof(F8_E4M3) == 36);

float e4m3_to_float(uint8_t bits) {
    constexpr uint16_t kNan = 0x7e00U;
    const uint16_t half = (bits & 0x7fU) == 0x7fU ? kNan : cpu::e4m3_to_half(bits);
    return half_to_float(half) * cpu::kE4m3OverHalf;
}

void decode_e4m3(const std::byte* src, int64_t count, float* dst) {
    F8_E4M3 block;
    for (int64_t i = 0; i < count; i += F8_E4M3::kValues, src += sizeof block) {
        std::memcpy(&block, src, sizeof block);
        for (int64_t j = 0; j < F8_E4M3::kValues; ++j) {
            dst[i + j] = e4m3_to_float(block.values[j]) * block.scale;
        }
    }
}

struct TypeInfo {
    std::string_view name;
    StoredType type;
    int64_t values, bytes;
    Packing packing = Packing::F32;  // that holds the codes and scales as they are
    void (*read)(const std::byte*, IntegerBlock*) = nullptr;
};

template <typename Block>
constexpr TypeInfo integers(std::string_view name, StoredType type, Packing packing) {
    return {name, type, Block::kValues, sizeof(Block), packing, read_bytes<Block>};
}

// In the order of the enumeration.
constexpr TypeInfo kTypes[] = {
    {"F32", StoredType::F32, 1, 4},
    {"F16", StoredType::F16, 1, 2},
    {"BF16", StoredType::BF16, 1, 2},
    {"F8_E4M3", StoredType::F8_E4M3, kSmall, sizeof(F8_E4M3)},
    integers<Q8_0>("Q8_0", StoredType::Q8_0, Packing::Q8),
    integers<Q4_0>("Q4_0", StoredType::Q4_0, Packing::Q4_0),
    integers<Q4_1>("Q4_1", StoredType::Q4_1, Packing::Q4),
    integers<Q5_0>("Q5_0", StoredType::Q5_0, Packing::Q5_0),
    integers<Q5_1>("Q5_1", StoredType::Q5_1, Packing::Q5_1),
    integers<Q2_K>("Q2_K", StoredType::Q2_K, Packing::Q2_K),
    integers<Q3_K>("Q3_K", StoredType::Q3_K, Packing::Q3_K),
    integers<Q4_K>("Q4_K", StoredType::Q4_K, Packing::Q4_K),
    integers<Q5_K>("Q5_K", StoredType::Q5_K, Packing::Q5_K),
    integers<Q6_K>("Q6_K", StoredType::Q6_K, Packing::Q6_K),
    integers<IQ4_NL>("IQ4_NL", StoredType::IQ4_NL, Packing::IQ4_NL),
    integers<IQ4_XS>("IQ4_XS", StoredType::IQ4_XS, Packing::IQ4_XS),
    integers<MXFP4>("MXFP4", StoredType::MXFP4, Packing::MXFP4),
    integers<NVFP4>("NVFP4", StoredType::NVFP4, Packing::NVFP4),
};

constexpr bool in_order() {
    int i = 0;
    for (const TypeInfo& info : kTypes) {
        if (static_cast<int>(info.type) != i++) return false;
    }
    return true;
}
static_assert(in_order());

constexpr const TypeInfo& info_of(StoredType type) { return kTypes[static_cast<int>(type)]; }

}  // namespace

std::optional<StoredType> stored_type(std::string_view name) {
    for (const TypeInfo& info : kTypes) {
        if (info.name == name) return info.type;
    }
    return std::nullopt;
}

const char* name_of(StoredType type) { return info_of(type).name.data(); }

int64_t block_values(StoredType type) { return info_of(type).values; }

int64_t block_bytes(StoredType type) { return info_of(type).bytes; }

std::optional<cpu::Packing> packing_of(StoredType type) {
    const TypeInfo& info = info_of(type);
    return info.read == nullptr ? std::nullopt : std::optional(info.packing);
}

void read_block(StoredType type, const std::byte* block, cpu::IntegerBlock* to) {
    info_of(type).read(block, to);
}

void dequantize(StoredType type, const std::byte* src, int64_t count, float* dst) {
    assert(count % block_values(type) == 0);
    switch (type) {
        case StoredType::F32:
            if (count > 0) std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(float));
            return;
        case StoredType::F16:
            return convert_16_bits(src, count, dst,
                                   [](uint16_t bits) { return half_to_float(bits); });
        case StoredType::BF16:
            return convert_16_bits(src, count, dst,
                                   [](uint16_t bits) { return bf16_to_float(bits); });
        case StoredType::F8_E4M3:
            return decode_e4m3(src, count, dst);
        default:
            break;
    }
    const TypeInfo& info = info_of(type);
    IntegerBlock block;
    for (int64_t i = 0; i < count; i += info.values, src += info.bytes) {
        info.read(src, &block);
        cpu::expand(cpu::format_of(info.packing), block, dst + i);
    }
}

}  // namespace octavo
