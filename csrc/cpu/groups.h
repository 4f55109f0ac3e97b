// How a panel holds 8- and 4-bit weights: groups of 32 columns, one behind the other, each with its
// 16 rows' integers and then their scales in half precision.
//
// q8: value = q * scale, q a signed byte. For each quad of columns its 16 rows' four bytes, in the
// order first, third, second, fourth: so the even bytes of a row are two columns side by side, and
// so are the odd ones.
// q4: value = q * scale + minimum, q from 0 to 15. For each pair of quads its 16 rows' four bytes:
// the first quad in the low halves of the bytes, the second one in the high halves. After the
// scales the minima.
#pragma once

#include <cstring>

#include "common/half.h"
#include "cpu/kernels.h"

namespace octavo::cpu {

constexpr int64_t kQuadBytes = 4 * kPanelRows;  // a quad of 8-bit, or two of 4-bit columns
constexpr int64_t place_in_quad(int64_t column) { return column % 2 * 2 + column / 2; }

constexpr int64_t scales_offset(Packing packing) {
    return packing == Packing::Q8 ? kGroupColumns * kPanelRows : kGroupColumns * kPanelRows / 2;
}
constexpr int64_t minima_offset(Packing packing) { return scales_offset(packing) + 2 * kPanelRows; }

static_assert(scales_offset(Packing::Q8) + 2 * kPanelRows == kQ8GroupBytes);
static_assert(minima_offset(Packing::Q4) + 2 * kPanelRows == kQ4GroupBytes);

// One row of a group, outside of panels.
struct GroupRow {
    int8_t q[kGroupColumns] = {};
    uint16_t scale = 0;
    uint16_t minimum = 0;  // q4 only
};

OCTAVO_INLINE void put(Packing packing, std::byte* group, int64_t lane, const GroupRow& row) {
    std::byte* to = group + lane * 4;
    if (packing == Packing::Q8) {
        for (int64_t i = 0; i < kGroupColumns; ++i) {
            to[i / 4 * kQuadBytes + place_in_quad(i % 4)] = static_cast<std::byte>(row.q[i]);
        }
    } else {
        for (int64_t i = 0; i < kGroupColumns / 2; ++i) {
            const int8_t* first = row.q + i / 4 * 8 + i % 4;
            to[i / 4 * kQuadBytes + place_in_quad(i % 4)] =
                static_cast<std::byte>(first[0] | first[4] << 4);
        }
        std::memcpy(group + minima_offset(packing) + lane * 2, &row.minimum, 2);
    }
    std::memcpy(group + scales_offset(packing) + lane * 2, &row.scale, 2);
}

OCTAVO_INLINE GroupRow take(Packing packing, const std::byte* group, int64_t lane) {
    GroupRow row;
    const std::byte* from = group + lane * 4;
    if (packing == Packing::Q8) {
        for (int64_t i = 0; i < kGroupColumns; ++i) {
            row.q[i] = static_cast<int8_t>(from[i / 4 * kQuadBytes + place_in_quad(i % 4)]);
        }
    } else {
        for (int64_t i = 0; i < kGroupColumns / 2; ++i) {
            int8_t* first = row.q + i / 4 * 8 + i % 4;
            const auto both = static_cast<uint8_t>(from[i / 4 * kQuadBytes + place_in_quad(i % 4)]);
            first[0] = static_cast<int8_t>(both & 15);
            first[4] = static_cast<int8_t>(both >> 4);
        }
        std::memcpy(&row.minimum, group + minima_offset(packing) + lane * 2, 2);
    }
    std::memcpy(&row.scale, group + scales_offset(packing) + lane * 2, 2);
    return row;
}

// The values that a row stands for. q8 has no minimum, and adding a zero changes no value.
OCTAVO_INLINE void expand(const GroupRow& row, float* to) {
    const float scale = half_to_float(row.scale);
    const float minimum = half_to_float(row.minimum);
    for (int64_t i = 0; i < kGroupColumns; ++i) {
        to[i] = static_cast<float>(row.q[i]) * scale + minimum;
    }
}

}  // namespace octavo::cpu
