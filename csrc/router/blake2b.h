// BLAKE2b as RFC 7693 defines it, unkeyed, with a personalisation: what route keys are made of.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>

namespace octavo::router::blake2b {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

using State = std::array<uint64_t, 8>;
using Block = std::array<uint64_t, 16>;

inline constexpr size_t kBlockBytes = 128;
inline constexpr State kIv = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                              0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                              0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
// Rounds 10 and 11 use rows 0 and 1 again.
inline constexpr uint8_t kSigma[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                           {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                           {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                           {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                           {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                           {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                           {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                           {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                           {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                           {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

// The state before the first block: fanout 1, depth 1, no key, no salt.
constexpr State initial_state(size_t digest_bytes, std::string_view person) {
    State state = kIv;
    state[0] ^= 0x01010000 ^ digest_bytes;
    for (size_t i = 0; i < person.size(); ++i) {
        state[6 + i / 8] ^= uint64_t{static_cast<uint8_t>(person[i])} << (i % 8 * 8);
    }
    return state;
}

[[gnu::always_inline]] inline void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d,
                                       uint64_t x, uint64_t y) {
    a += b + x;
    d = std::rotr(d ^ a, 32);
    c += d;
    b = std::rotr(b ^ c, 24);
    a += b + y;
    d = std::rotr(d ^ a, 16);
    c += d;
    b = std::rotr(b ^ c, 63);
}

// Unrolled by its template, so that words known to be zero cost nothing.
template <size_t Round>
[[gnu::always_inline]] inline void round(Block& v, const Block& m) {
    constexpr const uint8_t* s = kSigma[Round % 10];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

template <size_t... Rounds>
[[gnu::always_inline]] inline void all_rounds(Block& v, const Block& m,
                                              std::index_sequence<Rounds...> /*rounds*/) {
    (round<Rounds>(v, m), ...);
}

// `num_bytes`: of the message up to and with this block.
[[gnu::always_inline]] inline void compress(State& h, const Block& m, uint64_t num_bytes,
                                            bool is_last) {
    Block v;
    for (size_t i = 0; i < 8; ++i) {
        v[i] = h[i];
        v[i + 8] = kIv[i];
    }
    v[12] ^= num_bytes;
    v[14] ^= is_last ? ~uint64_t{0} : 0;
    all_rounds(v, m, std::make_index_sequence<12>());
    for (size_t i = 0; i < 8; ++i) {
        h[i] ^= v[i] ^ v[i + 8];
    }
}

// The whole digest; its first `digest_bytes` are the answer.
[[gnu::noinline]] inline State digest(State state, std::string_view message) {
    Block block;
    size_t at = 0;
    for (; message.size() - at > kBlockBytes; at += kBlockBytes) {
        std::memcpy(block.data(), message.data() + at, kBlockBytes);
        compress(state, block, at + kBlockBytes, false);
    }
    block = {};
    if (at < message.size()) {
        std::memcpy(block.data(), message.data() + at, message.size() - at);
    }
    compress(state, block, message.size(), true);
    return state;
}

}  // namespace octavo::router::blake2b
