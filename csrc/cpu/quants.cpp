// Stored number formats to float32. The float operations and their order are those of the `gguf`
// package, so that results are equal by bits; the build turns contraction to fused operations off.
#include "cpu/quants.h"

#include <bit>
#include <cassert>
#include <cstring>

#include "common/half.h"
#include "cpu/groups.h"

namespace octavo {
namespace {

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
static_assert(sizeof(Q8_0) == 34 && sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20);
static_assert(sizeof(Q5_0) == 22 && sizeof(Q5_1) == 24 && sizeof(Q2_K) == 84);
static_assert(sizeof(Q3_K) == 110 && sizeof(Q4_K) == 144 && sizeof(Q5_K) == 176);
static_assert(sizeof(Q6_K) == 210);
static_assert(std::endian::native == std::endian::little, "files are little-endian");

inline uint32_t load_u32(const uint8_t* bytes) {
    uint32_t value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

void decode(const Q8_0& block, float* __restrict dst) {
    const float d = half_to_float(block.d);
    for (int i = 0; i < 32; ++i) dst[i] = static_cast<float>(block.q[i]) * d;
}

void decode(const Q4_0& block, float* __restrict dst) {
    const float d = half_to_float(block.d);
    for (int i = 0; i < 16; ++i) {
        dst[i] = d * static_cast<float>((block.q[i] & 15) - 8);
        dst[i + 16] = d * static_cast<float>((block.q[i] >> 4) - 8);
    }
}

void decode(const Q4_1& block, float* __restrict dst) {
    const float d = half_to_float(block.d), m = half_to_float(block.m);
    for (int i = 0; i < 16; ++i) {
        dst[i] = d * static_cast<float>(block.q[i] & 15) + m;
        dst[i + 16] = d * static_cast<float>(block.q[i] >> 4) + m;
    }
}

// The five-bit values of Q5_0 and Q5_1.
inline void five_bits(const uint8_t* q, uint32_t high, int32_t* __restrict out) {
    for (int i = 0; i < 16; ++i) {
        out[i] = (q[i] & 15) | static_cast<int32_t>((high >> i & 1) << 4);
        out[i + 16] = (q[i] >> 4) | static_cast<int32_t>((high >> (i + 16) & 1) << 4);
    }
}

void decode(const Q5_0& block, float* __restrict dst) {
    const float d = half_to_float(block.d);
    int32_t q[32];
    five_bits(block.q, load_u32(block.high), q);
    for (int i = 0; i < 32; ++i) dst[i] = d * static_cast<float>(q[i] - 16);
}

void decode(const Q5_1& block, float* __restrict dst) {
    const float d = half_to_float(block.d), m = half_to_float(block.m);
    int32_t q[32];
    five_bits(block.q, load_u32(block.high), q);
    for (int i = 0; i < 32; ++i) dst[i] = d * static_cast<float>(q[i]) + m;
}

// K types come in halves of 128 values; bits of values 32 apart share a byte.

void decode(const Q2_K& block, float* __restrict dst) {
    const float d = half_to_float(block.d), d_min = half_to_float(block.d_min);
    for (int sub = 0; sub < 16; ++sub) {
        const float scale = d * static_cast<float>(block.scales[sub] & 15);
        const float minimum = d_min * static_cast<float>(block.scales[sub] >> 4);
        const uint8_t* q = block.q + sub / 8 * 32 + sub % 2 * 16;
        const int shift = sub % 8 / 2 * 2;
        for (int i = 0; i < 16; ++i) {
            dst[sub * 16 + i] = scale * static_cast<float>(q[i] >> shift & 3) - minimum;
        }
    }
}

void decode(const Q3_K& block, float* __restrict dst) {
    const float d = half_to_float(block.d);
    for (int sub = 0; sub < 16; ++sub) {
        const int low = sub < 8 ? block.scales[sub] & 15 : block.scales[sub - 8] >> 4;
        const int high = block.scales[8 + sub % 4] >> (sub / 4 * 2) & 3;
        const float scale = d * static_cast<float>((low | high << 4) - 32);
        const uint8_t* q = block.q + sub / 8 * 32 + sub % 2 * 16;
        const uint8_t* mask = block.high + sub % 2 * 16;
        const int shift = sub % 8 / 2 * 2, bit = sub / 2;
        for (int i = 0; i < 16; ++i) {
            // A set bit means that nothing is to be subtracted.
            const int value = (q[i] >> shift & 3) - ((mask[i] >> bit & 1) ^ 1) * 4;
            dst[sub * 16 + i] = scale * static_cast<float>(value);
        }
    }
}

struct ScaleMin {
    int scale, minimum;
};

inline ScaleMin scale_min(const uint8_t* scales, int sub) {
    if (sub < 4) return {scales[sub] & 63, scales[sub + 4] & 63};
    const int low = scales[sub + 4];
    return {(low & 15) | (scales[sub - 4] >> 6) << 4, (low >> 4) | (scales[sub] >> 6) << 4};
}

void decode(const Q4_K& block, float* __restrict dst) {
    const float d = half_to_float(block.d), d_min = half_to_float(block.d_min);
    for (int sub = 0; sub < 8; ++sub) {
        const ScaleMin s = scale_min(block.scales, sub);
        const float scale = d * static_cast<float>(s.scale);
        const float minimum = d_min * static_cast<float>(s.minimum);
        const uint8_t* q = block.q + sub / 2 * 32;
        const int shift = sub % 2 * 4;
        for (int i = 0; i < 32; ++i) {
            dst[sub * 32 + i] = scale * static_cast<float>(q[i] >> shift & 15) - minimum;
        }
    }
}

void decode(const Q5_K& block, float* __restrict dst) {
    const float d = half_to_float(block.d), d_min = half_to_float(block.d_min);
    for (int sub = 0; sub < 8; ++sub) {
        const ScaleMin s = scale_min(block.scales, sub);
        const float scale = d * static_cast<float>(s.scale);
        const float minimum = d_min * static_cast<float>(s.minimum);
        const uint8_t* q = block.q + sub / 2 * 32;
        const int shift = sub % 2 * 4;
        for (int i = 0; i < 32; ++i) {
            const int value = (q[i] >> shift & 15) | (block.high[i] >> sub & 1) << 4;
            dst[sub * 32 + i] = scale * static_cast<float>(value) - minimum;
        }
    }
}

void decode(const Q6_K& block, float* __restrict dst) {
    const float d = half_to_float(block.d);
    for (int sub = 0; sub < 16; ++sub) {
        const float scale = d * static_cast<float>(block.scales[sub]);
        const int part = sub % 8 / 2;  // quarter of the half: 32 values
        const uint8_t* low = block.low + sub / 8 * 64 + part % 2 * 32 + sub % 2 * 16;
        const uint8_t* high = block.high + sub / 8 * 32 + sub % 2 * 16;
        const int low_shift = part / 2 * 4, high_shift = part * 2;
        for (int i = 0; i < 16; ++i) {
            const int value = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
            dst[sub * 16 + i] = scale * static_cast<float>(value - 32);
        }
    }
}

template <typename Block>
void decode_all(const std::byte* src, int64_t count, float* dst) {
    Block block;
    for (int64_t i = 0; i < count / Block::kValues; ++i) {
        std::memcpy(&block, src + i * static_cast<int64_t>(sizeof block), sizeof block);
        decode(block, dst + i * Block::kValues);
    }
}

template <typename Convert>
void convert_16_bits(const std::byte* src, int64_t count, float* __restrict dst, Convert convert) {
    for (int64_t i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, src + i * 2, sizeof bits);
        dst[i] = convert(bits);
    }
}

struct TypeInfo {
    std::string_view name;
    StoredType type;
    int64_t values, bytes;
};

// In the order of the enumeration.
constexpr TypeInfo kTypes[] = {
    {"F32", StoredType::F32, 1, 4},
    {"F16", StoredType::F16, 1, 2},
    {"BF16", StoredType::BF16, 1, 2},
    {"Q8_0", StoredType::Q8_0, kSmall, sizeof(Q8_0)},
    {"Q4_0", StoredType::Q4_0, kSmall, sizeof(Q4_0)},
    {"Q4_1", StoredType::Q4_1, kSmall, sizeof(Q4_1)},
    {"Q5_0", StoredType::Q5_0, kSmall, sizeof(Q5_0)},
    {"Q5_1", StoredType::Q5_1, kSmall, sizeof(Q5_1)},
    {"Q2_K", StoredType::Q2_K, kSuper, sizeof(Q2_K)},
    {"Q3_K", StoredType::Q3_K, kSuper, sizeof(Q3_K)},
    {"Q4_K", StoredType::Q4_K, kSuper, sizeof(Q4_K)},
    {"Q5_K", StoredType::Q5_K, kSuper, sizeof(Q5_K)},
    {"Q6_K", StoredType::Q6_K, kSuper, sizeof(Q6_K)},
};

constexpr bool in_order() {
    int i = 0;
    for (const TypeInfo& info : kTypes) {
        if (static_cast<int>(info.type) != i++) return false;
    }
    return true;
}
static_assert(in_order());

}  // namespace

std::optional<StoredType> stored_type(std::string_view name) {
    for (const TypeInfo& info : kTypes) {
        if (info.name == name) return info.type;
    }
    return std::nullopt;
}

int64_t block_values(StoredType type) { return kTypes[static_cast<int>(type)].values; }

int64_t block_bytes(StoredType type) { return kTypes[static_cast<int>(type)].bytes; }

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
            return convert_16_bits(src, count, dst, [](uint16_t bits) {
                return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
            });
        case StoredType::Q8_0:
            return decode_all<Q8_0>(src, count, dst);
        case StoredType::Q4_0:
            return decode_all<Q4_0>(src, count, dst);
        case StoredType::Q4_1:
            return decode_all<Q4_1>(src, count, dst);
        case StoredType::Q5_0:
            return decode_all<Q5_0>(src, count, dst);
        case StoredType::Q5_1:
            return decode_all<Q5_1>(src, count, dst);
        case StoredType::Q2_K:
            return decode_all<Q2_K>(src, count, dst);
        case StoredType::Q3_K:
            return decode_all<Q3_K>(src, count, dst);
        case StoredType::Q4_K:
            return decode_all<Q4_K>(src, count, dst);
        case StoredType::Q5_K:
            return decode_all<Q5_K>(src, count, dst);
        case StoredType::Q6_K:
            return decode_all<Q6_K>(src, count, dst);
    }
}

cpu::GroupRow read_group(StoredType type, const std::byte* block) {
    cpu::GroupRow group;
    if (type == StoredType::Q8_0) {
        Q8_0 stored;
        std::memcpy(&stored, block, sizeof stored);
        std::memcpy(group.q, stored.q, sizeof stored.q);
        group.scale = stored.d;
        return group;
    }
    Q4_1 stored;
    if (type == StoredType::Q4_1) {
        std::memcpy(&stored, block, sizeof stored);
    } else {
        assert(type == StoredType::Q4_0);
        Q4_0 centred;
        std::memcpy(&centred, block, sizeof centred);
        std::memcpy(stored.q, centred.q, sizeof stored.q);
        stored.d = centred.d;
        stored.m = float_to_half(-8.0F * half_to_float(centred.d));  // exact
    }
    for (int i = 0; i < 16; ++i) {
        group.q[i] = static_cast<int8_t>(stored.q[i] & 15);
        group.q[i + 16] = static_cast<int8_t>(stored.q[i] >> 4);
    }
    group.scale = stored.d;
    group.minimum = stored.m;
    return group;
}

}  // namespace octavo
