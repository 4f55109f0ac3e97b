#include "cpu/groups.h"

#include <cstring>

#include "common/half.h"

namespace octavo::cpu {
namespace {

// One row's codes of one plane; `from` is the first bit of a code.
template <int Bits>
inline void put_plane(const uint8_t* codes, int from, std::byte* plane, int64_t lane) {
    constexpr int kFields = 16 / Bits;
    constexpr uint32_t kMask = (1U << Bits) - 1;
    for (int64_t chunk = 0; chunk < kGroupPairs / kFields; ++chunk) {
        uint32_t word = 0;
        for (int field = 0; field < kFields; ++field) {
            const uint8_t* pair = codes + (chunk * kFields + field) * 2;
            word |= (pair[0] >> from & kMask) << (field * Bits);
            word |= (pair[1] >> from & kMask) << (16 + field * Bits);
        }
        std::memcpy(plane + chunk * kChunkBytes + lane * 4, &word, 4);
    }
}

inline void put_plane(int bits, const uint8_t* codes, int from, std::byte* plane, int64_t lane) {
    switch (bits) {
        case 1:
            return put_plane<1>(codes, from, plane, lane);
        case 2:
            return put_plane<2>(codes, from, plane, lane);
        case 4:
            return put_plane<4>(codes, from, plane, lane);
        case 8:
            return put_plane<8>(codes, from, plane, lane);
        default:
            return;
    }
}

// The reverse: the plane's bits of a row's codes, which are zero there.
template <int Bits>
inline void take_plane(const std::byte* plane, int64_t lane, int to, uint8_t* codes) {
    constexpr int kFields = 16 / Bits;
    constexpr uint32_t kMask = (1U << Bits) - 1;
    for (int64_t chunk = 0; chunk < kGroupPairs / kFields; ++chunk) {
        uint32_t word;
        std::memcpy(&word, plane + chunk * kChunkBytes + lane * 4, 4);
        for (int field = 0; field < kFields; ++field) {
            uint8_t* pair = codes + (chunk * kFields + field) * 2;
            pair[0] |= static_cast<uint8_t>((word >> (field * Bits) & kMask) << to);
            pair[1] |= static_cast<uint8_t>((word >> (16 + field * Bits) & kMask) << to);
        }
    }
}

inline void take_plane(int bits, const std::byte* plane, int64_t lane, int to, uint8_t* codes) {
    switch (bits) {
        case 1:
            return take_plane<1>(plane, lane, to, codes);
        case 2:
            return take_plane<2>(plane, lane, to, codes);
        case 4:
            return take_plane<4>(plane, lane, to, codes);
        case 8:
            return take_plane<8>(plane, lane, to, codes);
        default:
            return;
    }
}

// to = scale * the integers that codes stand for.
inline void scale_codes(const Format& format, const uint8_t* codes, int64_t count, float scale,
                        float* __restrict to) {
    if (format.codes >= Codes::Nonlinear) {
        const int8_t* table = format.codes == Codes::Nonlinear ? kNonlinear : kFloat4;
        for (int64_t i = 0; i < count; ++i) {
            to[i] = scale * static_cast<float>(table[codes[i]]);
        }
    } else if (format.codes == Codes::Signed) {
        for (int64_t i = 0; i < count; ++i) {
            to[i] = scale * static_cast<float>(static_cast<int8_t>(codes[i]));
        }
    } else {
        const int less = format.codes == Codes::Centred ? 1 << (format.bits - 1) : 0;
        for (int64_t i = 0; i < count; ++i) {
            to[i] = scale * static_cast<float>(codes[i] - less);
        }
    }
}

inline float e4m3(int8_t bits) {
    return half_to_float(e4m3_to_half(static_cast<uint8_t>(bits))) * kE4m3OverHalf;
}

}  // namespace

void put(const Format& format, std::byte* panel, int64_t index, int64_t lane,
         const IntegerBlock& row) {
    std::byte* block = panel + format.factors_bytes() + index * format.block_bytes();
    std::byte* group = block + format.header_bytes();
    std::byte* scale = format.has_small() ? block : group + format.scales_offset();
    if (format.has_factors()) {
        std::memcpy(panel + lane * 4, &row.factor, 4);
    } else if (format.scales == Scales::Power) {
        scale[lane] = static_cast<std::byte>(row.scale);
    } else {
        std::memcpy(scale + lane * 2, &row.scale, 2);
    }
    if (format.has_minima) {
        std::byte* minimum =
            format.has_small() ? block + kHalvesBytes : group + format.minima_offset();
        std::memcpy(minimum + lane * 2, &row.minimum, 2);
    }
    for (int64_t g = 0; g < format.block_groups(); ++g, group += format.group_bytes()) {
        const uint8_t* codes = row.codes + g * kGroupColumns;
        put_plane(format.low_bits(), codes, 0, group, lane);
        put_plane(format.high_bits(), codes, format.low_bits(), group + format.high_plane(), lane);
        for (int64_t sub = 0; format.has_subs() && sub < format.subs; ++sub) {
            const int64_t at = sub * kPanelRows + lane;
            const auto scale_bits = static_cast<uint8_t>(row.scales[g * format.subs + sub]);
            const uint8_t minimum_bits = row.minima[g * format.subs + sub];
            const bool together = format.scales == Scales::Nibbles;
            group[format.scales_offset() + at] =
                static_cast<std::byte>(together ? scale_bits | minimum_bits << 4 : scale_bits);
            if (format.has_minima && !together) {
                group[format.minima_offset() + at] = static_cast<std::byte>(minimum_bits);
            }
        }
    }
}

IntegerBlock take(const Format& format, const std::byte* panel, int64_t index, int64_t lane) {
    IntegerBlock row;
    const std::byte* block = panel + format.factors_bytes() + index * format.block_bytes();
    const std::byte* group = block + format.header_bytes();
    const std::byte* scale = format.has_small() ? block : group + format.scales_offset();
    if (format.has_factors()) {
        std::memcpy(&row.factor, panel + lane * 4, 4);
    } else if (format.scales == Scales::Power) {
        row.scale = static_cast<uint8_t>(scale[lane]);
    } else {
        std::memcpy(&row.scale, scale + lane * 2, 2);
    }
    if (format.has_minima) {
        const std::byte* minimum =
            format.has_small() ? block + kHalvesBytes : group + format.minima_offset();
        std::memcpy(&row.minimum, minimum + lane * 2, 2);
    }
    for (int64_t g = 0; g < format.block_groups(); ++g, group += format.group_bytes()) {
        uint8_t* codes = row.codes + g * kGroupColumns;
        std::memset(codes, 0, kGroupColumns);
        take_plane(format.low_bits(), group, lane, 0, codes);
        take_plane(format.high_bits(), group + format.high_plane(), lane, format.low_bits(), codes);
        for (int64_t sub = 0; format.has_subs() && sub < format.subs; ++sub) {
            const int64_t at = sub * kPanelRows + lane;
            const auto scale_bits = static_cast<uint8_t>(group[format.scales_offset() + at]);
            const auto minimum_bits = static_cast<uint8_t>(group[format.minima_offset() + at]);
            const bool together = format.scales == Scales::Nibbles;
            row.scales[g * format.subs + sub] =
                static_cast<int8_t>(together ? scale_bits & 15 : scale_bits);
            if (format.has_minima) {
                row.minima[g * format.subs + sub] =
                    static_cast<uint8_t>(together ? minimum_bits >> 4 : minimum_bits);
            }
        }
    }
    return row;
}

void expand(const Format& format, const IntegerBlock& row, float* __restrict to) {
    const float d = format.scales == Scales::Power ? power_scale(row.scale)  //
                                                   : half_to_float(row.scale);
    const float d_min = half_to_float(row.minimum);
    const int64_t columns = kGroupColumns / format.subs;
    for (int64_t sub = 0; sub < format.block_groups() * format.subs; ++sub) {
        const float scale = format.has_factors() ? e4m3(row.scales[sub]) * row.factor
                            : format.has_small() ? d * static_cast<float>(row.scales[sub])
                                                 : d;
        const float minimum =
            format.has_small() ? d_min * static_cast<float>(row.minima[sub]) : d_min;
        scale_codes(format, row.codes + sub * columns, columns, scale, to);
        if (format.has_minima) {
            for (int64_t i = 0; i < columns; ++i) {
                to[i] += minimum;
            }
        }
        to += columns;
    }
}

}  // namespace octavo::cpu
