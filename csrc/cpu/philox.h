// Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, 2011): random numbers as a
// pure function of a key and a counter. There is no state to save, so a token can be drawn again
// anywhere.
#pragma once

#include <array>
#include <cstdint>

namespace octavo {

using PhiloxWords = std::array<uint32_t, 4>;

// The 64-bit key is its two words, low one first; the counter's upper two words are zero.
constexpr PhiloxWords philox(uint64_t key, uint64_t counter) {
    PhiloxWords w = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(w[0]) * 0xD2511F53u;
        const uint64_t b = static_cast<uint64_t>(w[2]) * 0xCD9E8D57u;
        w = {static_cast<uint32_t>(b >> 32) ^ w[1] ^ k0, static_cast<uint32_t>(b),
             static_cast<uint32_t>(a >> 32) ^ w[3] ^ k1, static_cast<uint32_t>(a)};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return w;
}

// The first two words as one number.
constexpr uint64_t philox_u64(uint64_t key, uint64_t counter) {
    const PhiloxWords w = philox(key, counter);
    return static_cast<uint64_t>(w[1]) << 32 | w[0];
}

// The authors' published test vector.
static_assert(philox(0, 0) == PhiloxWords{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});

}  // namespace octavo
