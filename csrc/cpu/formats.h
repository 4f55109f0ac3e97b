// The forms in which a panel of 16 rows holds its weights, and how integer weights lie in it.
//
// All integer forms are one: groups of 32 columns of `bits`-bit codes, a code stands for a small
// integer, and value = integer * scale + minimum. A format says how many bits, which integers, and
// how scales and minima are stored. Kernels are made from it at compile time.
//
//   panel    formats whose scales are 8-bit floats: 16 rows' factors in float32; then blocks, one
//            behind the other
//   block    formats with small scales: 16 rows' half-precision scales, then minima; 8 groups
//            others: one group
//   group    planes of the codes' bits; then scales and minima
//
// A plane of w bits is chunks of 64 bytes: a word of two 16-bit halves for each row. The halves are
// an even and the following odd column, and hold 16 / w pairs of columns, lowest bits first. A code
// whose bits are no power of two is split over two planes, low bits first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::cpu {

constexpr int64_t kPanelRows = 16;     // also the tokens of a KV block
constexpr int64_t kGroupColumns = 32;  // of integers that share a step of the dot product
constexpr int64_t kGroupPairs = kGroupColumns / 2;
constexpr int64_t kChunkBytes = 4 * kPanelRows;
constexpr int64_t kHalvesBytes = 2 * kPanelRows;  // 16 rows' numbers in half precision

// As numbers: F32, BF16. As integers that were quantised here, or in Q8_0's and Q4_1's blocks: Q8,
// Q4. As checkpoints of that name have them: NVFP4. As the GGUF type of that name has them: the
// rest.
enum class Packing : uint8_t {
    F32,
    BF16,
    Q8,
    Q4,
    Q4_0,
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
constexpr int kNumPackings = 16;

// Which integer a code stands for.
enum class Codes : uint8_t {
    Signed,     // itself, in two's complement
    Plain,      // itself
    Centred,    // itself less half the number of codes
    Nonlinear,  // kNonlinear
    Float4      // kFloat4: twice the 4-bit float
};

enum class Scales : uint8_t {
    Half,    // in half precision, one a group
    Power,   // of two, an exponent of 8 bits
    Float8,  // an 8-bit float (e4m3) for each sub, times the row's factor
    Small,   // a small integer times the block's scale in half precision
    Nibbles  // the same, the small ones of scale and minimum together in a byte
};

struct Format {
    const char* name;
    int bits = 0;  // none: weights are numbers
    Codes codes = Codes::Plain;
    Scales scales = Scales::Half;
    int subs = 1;  // small scales of a group, or floats of 8 bits
    bool has_minima = false;

    constexpr bool is_integer() const { return bits != 0; }
    constexpr bool has_small() const { return scales >= Scales::Small; }
    constexpr bool has_subs() const { return scales >= Scales::Float8; }
    constexpr bool has_factors() const { return scales == Scales::Float8; }
    // Sums of products that a group makes, each with a scale of its own.
    constexpr int sums() const { return has_factors() ? subs : 1; }
    constexpr int64_t block_groups() const { return has_small() ? 8 : 1; }
    constexpr int64_t block_columns() const { return block_groups() * kGroupColumns; }

    // Low bits' plane, and the other one's, which is none for a power of two.
    constexpr int low_bits() const { return bits > 4 && bits < 8 ? 4 : bits == 3 ? 2 : bits; }
    constexpr int high_bits() const { return bits - low_bits(); }
    constexpr int64_t high_plane() const { return low_bits() * kChunkBytes; }
    constexpr int64_t scales_offset() const { return bits * kChunkBytes; }
    constexpr int64_t scales_bytes() const {
        return scales == Scales::Half ? kHalvesBytes : kPanelRows * subs;
    }
    constexpr int64_t minima_offset() const {
        return scales_offset() + (scales == Scales::Nibbles ? 0 : scales_bytes());
    }
    constexpr int64_t group_bytes() const {
        return minima_offset() +
               (has_minima || scales == Scales::Nibbles ? scales_bytes() : int64_t{0});
    }
    constexpr int64_t factors_bytes() const { return has_factors() ? 4 * kPanelRows : 0; }
    constexpr int64_t header_bytes() const {
        return has_small() ? kHalvesBytes * (has_minima ? 2 : 1) : 0;
    }
    constexpr int64_t block_bytes() const {
        return header_bytes() + block_groups() * group_bytes();
    }
};

constexpr Format kFormats[kNumPackings] = {
    {"f32"},
    {"bf16"},
    {"q8", 8, Codes::Signed},
    {"q4", 4, Codes::Plain, Scales::Half, 1, true},
    {"q4_0", 4, Codes::Centred},
    {"q5_0", 5, Codes::Centred},
    {"q5_1", 5, Codes::Plain, Scales::Half, 1, true},
    {"q2_k", 2, Codes::Plain, Scales::Nibbles, 2, true},
    {"q3_k", 3, Codes::Centred, Scales::Small, 2},
    {"q4_k", 4, Codes::Plain, Scales::Small, 1, true},
    {"q5_k", 5, Codes::Plain, Scales::Small, 1, true},
    {"q6_k", 6, Codes::Centred, Scales::Small, 2},
    {"iq4_nl", 4, Codes::Nonlinear},
    {"iq4_xs", 4, Codes::Nonlinear, Scales::Small},
    {"mxfp4", 4, Codes::Float4, Scales::Power},
    {"nvfp4", 4, Codes::Float4, Scales::Float8, 2},
};

constexpr const Format& format_of(Packing packing) { return kFormats[static_cast<int>(packing)]; }

static_assert(format_of(Packing::MXFP4).scales == Scales::Power);
static_assert(format_of(Packing::NVFP4).block_bytes() == 18 * kPanelRows);
static_assert(format_of(Packing::Q8).group_bytes() * 32 == 34 * 512);
static_assert(format_of(Packing::Q6_K).block_bytes() == 210 * kPanelRows);
static_assert(format_of(Packing::Q2_K).block_bytes() == 84 * kPanelRows);

constexpr int8_t kNonlinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t kFloat4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr int integer_of(const Format& format, int code) {
    switch (format.codes) {
        case Codes::Signed:
            return static_cast<int8_t>(code);
        case Codes::Plain:
            return code;
        case Codes::Centred:
            return code - (1 << (format.bits - 1));
        case Codes::Nonlinear:
            return kNonlinear[code];
        case Codes::Float4:
            break;
    }
    return kFloat4[code];
}

// Where activations have 8 bits, codes of a whole plane are bytes: an unsigned number that is the
// integer plus an offset, at most so large.
struct CodeBytes {
    int offset, largest;
};
constexpr CodeBytes code_bytes(const Format& format) {
    const int last = (1 << format.bits) - 1;
    switch (format.codes) {
        case Codes::Signed:
            return {128, last};
        case Codes::Plain:
            return {0, last};
        case Codes::Centred:
            return {1 << (format.bits - 1), last};
        case Codes::Nonlinear:
            return {127, 127 + 113};
        case Codes::Float4:
            break;
    }
    return {12, 2 * 12};
}

// An integer times its small scale must be one of 13 bits, so that 32 products with activations of
// 15 bits (quantize.h) are a sum of 32.
constexpr int64_t kLargestInteger = 4096;

}  // namespace octavo::cpu
