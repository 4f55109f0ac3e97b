#include "common/crc32.h"

#include <array>
#include <cstring>

#include "common/machine.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#endif

namespace octavo {

namespace {

using Table = std::array<uint32_t, 256>;
using Bytes = std::span<const std::byte>;

constexpr uint32_t kPolynomial = 0xedb88320;  // bits the other way round

constexpr Table make_table() {
    Table table{};
    for (uint32_t byte = 0; byte < table.size(); ++byte) {
        uint32_t rest = byte;
        for (int bit = 0; bit < 8; ++bit) {
            rest = (rest >> 1) ^ ((rest & 1) != 0 ? kPolynomial : 0);
        }
        table[byte] = rest;
    }
    return table;
}

constexpr Table kTable = make_table();

// These take and return the checksum's register, which is its complement.
uint32_t add_bytes(uint32_t state, Bytes data) {
    for (const std::byte byte : data) {
        state = (state >> 8) ^ kTable[(state ^ std::to_integer<uint32_t>(byte)) & 0xff];
    }
    return state;
}

#if defined(__x86_64__)

constexpr const char* kFeature = "pclmul";
constexpr size_t kWidth = 16;
constexpr size_t kLanes = 4;

// What stands so far ahead of others that they differ by the constants' power of x has the same
// remainder as this, which may be added to them.
__attribute__((target("pclmul,sse4.1"))) inline __m128i ahead(__m128i value, __m128i constants) {
    return _mm_xor_si128(_mm_clmulepi64_si128(value, constants, 0x00),
                         _mm_clmulepi64_si128(value, constants, 0x11));
}

// Sixteen bytes with the remainder of all whole lanes; they take the place of those.
__attribute__((target("pclmul,sse4.1"))) uint32_t add_wide(uint32_t state, Bytes data) {
    const __m128i by_four = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);  // x^480, x^544
    const __m128i by_one = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);   // x^96, x^160
    const auto* at = reinterpret_cast<const __m128i*>(data.data());
    __m128i lanes[kLanes];
    for (size_t lane = 0; lane < kLanes; ++lane) {
        lanes[lane] = _mm_loadu_si128(at + lane);
    }
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
    const size_t count = data.size() / kWidth;
    size_t next = kLanes;
    for (; next + kLanes <= count; next += kLanes) {
        for (size_t lane = 0; lane < kLanes; ++lane) {
            lanes[lane] =
                _mm_xor_si128(ahead(lanes[lane], by_four), _mm_loadu_si128(at + next + lane));
        }
    }
    __m128i rest = lanes[0];
    for (size_t lane = 1; lane < kLanes; ++lane) {
        rest = _mm_xor_si128(ahead(rest, by_one), lanes[lane]);
    }
    std::array<std::byte, kWidth> last;
    std::memcpy(last.data(), &rest, kWidth);
    return add_bytes(add_bytes(0, last), data.subspan(next * kWidth));
}

#elif defined(__aarch64__)

constexpr const char* kFeature = "crc32";
constexpr size_t kWidth = 8;
constexpr size_t kLanes = 1;

__attribute__((target("+crc"))) uint32_t add_wide(uint32_t state, Bytes data) {
    const size_t end = data.size() / kWidth * kWidth;
    for (size_t at = 0; at < end; at += kWidth) {
        uint64_t word = 0;
        std::memcpy(&word, data.data() + at, kWidth);
        state = __crc32d(state, word);
    }
    return add_bytes(state, data.subspan(end));
}

#else

constexpr const char* kFeature = "";
constexpr size_t kWidth = 1;
constexpr size_t kLanes = 1;

uint32_t add_wide(uint32_t state, Bytes data) { return add_bytes(state, data); }

#endif

}  // namespace

uint32_t crc32(Bytes data, uint32_t value) {
    static const bool is_wide = has_feature(kFeature);
    const bool pays = is_wide && data.size() >= kWidth * kLanes;
    return ~(pays ? add_wide(~value, data) : add_bytes(~value, data));
}

}  // namespace octavo
